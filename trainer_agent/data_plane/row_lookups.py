"""Rows of embedding tables from all parameter servers: each is asked for the ids of its slots, until all are
there.

ids of each table ──by slot──► parameter servers ──rows at one version──► rows, in the order of the ids

Of whole tables some slots at a time, so that no answer is large.

each parameter server: slots from 0 on ──► ids, rows, next slot ──► ... ──► all, in the order of their ids
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer_agent.data_plane.fleet_client import FleetClient, Routes
from trainer_agent.tables.files import in_order
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.protocol.errors import (
    BadFrame,
    Gone,
    InvalidArgument,
    PeerError,
    StaleGeneration,
    UserCodeError,
    WrongOwner,
)
from trireme_shared.protocol.records.job_choices import Narrow, Transported
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.wire.messages import LookupEnd, LookupRequest, TableEnd, TableRequest
from trireme_shared.serving.transport.shared_memory import GradientMemory
from trireme_shared.tables.hashing import Ids, slots_of_tables
from trireme_shared.tables.payload import ids_in, joined, rows_in, size_of

if TYPE_CHECKING:
    from trireme_shared.tables.lanes import LaneRows  # loads numba

LOOKUP_WAIT_S = 10.0
Rows = npt.NDArray[np.float32]
Part = tuple[Ids, Rows]
Chosen = npt.NDArray[np.bool_] | slice
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows of `ids` at `version`, sent as `dtype`, each at its place (`places`) in `found`; a list item for
    each table."""

    version: int | None
    ids: Sequence[Ids]
    found: Sequence[Rows]
    places: Sequence[npt.NDArray[np.int64]]
    dtype: Narrow | None

    def where(self, chosen: Sequence[Chosen]) -> _Wanted:
        ids, places = (
            [each[own] for each, own in zip(some, chosen, strict=True)] for some in (self.ids, self.places)
        )
        return _Wanted(self.version, ids, self.found, places, self.dtype)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Gradients of rows for one parameter server. `counts`: how many of each table; `dtype`: of the gradients
    in the payload, if it is not float32."""

    counts: tuple[int, ...]
    payload: memoryview
    dtype: Narrow | None = None


class RowRouter:
    """Which parameter server owns which rows of the embedding tables, and a lane's gradients of rows by their
    owners."""

    def __init__(self, layout: Layout, gradient_dtype: Transported = "float32") -> None:
        self._layout, self._dtype = layout, narrow_of(gradient_dtype)

    @cached_property
    def dims(self) -> list[int]:
        """How many numbers a row of each table has."""
        return [spec.dim for spec in self._layout.tables]

    @cached_property
    def _gradient_memory(self) -> GradientMemory:
        return GradientMemory()

    def split_ids(self, routes: Routes, ids: Sequence[Ids]) -> dict[int, list[Chosen]]:
        """Return which ids of each table every parameter server owns, by its index."""
        everyone = sorted(set(routes.slots))
        if len(everyone) == 1:
            return {everyone[0]: [ALL for _ in ids]}
        slots = slots_of_tables(ids, [spec.seed for spec in self._layout.tables], self._layout.slot_count)
        owner_of, ends = np.array(routes.slots)[slots], np.cumsum([len(some) for some in ids]).tolist()
        parts = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        return {index: [own[part] for part in parts] for index in everyone for own in [owner_of == index]}

    def row_parts(self, routes: Routes, lane: Sequence[LaneRows]) -> dict[int, RowPart]:
        """A lane's gradients, by index of each parameter server that owns slots. One that gets none is told
        so: then it knows that nothing is missing. Raises UserCodeError: the gradients do not fit their
        dtype."""
        parts, dtype = {}, self._dtype
        for index, chosen in self.split_ids(routes, [rows.ids for rows in lane]).items():
            ids = [rows.ids[own] for rows, own in zip(lane, chosen, strict=True)]
            gradients = [rows.gradients[own] for rows, own in zip(lane, chosen, strict=True)]
            try:
                payload = joined(ids, gradients, dtype, self._gradient_memory.take)
            except OverflowError as error:
                what = f"a gradient of rows of embedding tables: {error}"
                msg = f"{what}; use gradient_dtype bfloat16, or scale the loss down"
                raise UserCodeError(msg, error_type="OverflowError") from error
            parts[index] = RowPart(tuple(len(some) for some in ids), payload, dtype)
        return parts

    def mean_rows(self, minibatches: Sequence[Sequence[LaneRows]]) -> Sequence[LaneRows]:
        """The mean over several minibatches, of each table."""
        # only where there are tables: it loads numba
        from trireme_shared.tables.lanes import mean_over_minibatches  # noqa: PLC0415

        return mean_over_minibatches(minibatches, self.dims)


def narrow_of(dtype: Transported) -> Narrow | None:
    """The narrower dtype in which values travel; None: they travel as they are, in float32."""
    return None if dtype == "float32" else dtype


class RowLookups:
    """Rows of the embedding tables, from all parameter servers. They travel in `parameter_dtype`."""

    def __init__(
        self, fleet: FleetClient, router: RowRouter, parameter_dtype: Transported = "float32"
    ) -> None:
        self._fleet, self._router, self._narrow = fleet, router, narrow_of(parameter_dtype)
        self._row_versions: dict[tuple[int, int], int] = {}

    def __repr__(self) -> str:
        return f"<RowLookups of {len(self._router.dims)} tables>"

    def take_row_versions(self) -> dict[tuple[int, int], int]:
        """Asynchronous: the lowest version of rows that were looked up since the last time, by slot map
        version and parameter server."""
        found, self._row_versions = self._row_versions, {}
        return found

    async def lookup(self, version: int | None, ids: Sequence[Ids], *, exact: bool = False) -> list[Rows]:
        """The rows at `version` (None: the newest ones): of each table float32 (n, dim). `ids`: of each table
        int64 (n,), ascending, each once. Waits until the parameter servers have the version. `exact`: in full
        precision, whatever parameter_dtype is. Raises Gone if it is no longer kept, InvalidArgument if rows
        do not fit the dtype, StaleGeneration."""
        dtype = None if exact else self._narrow
        found = [
            np.empty((len(some), dim), np.float32) for some, dim in zip(ids, self._router.dims, strict=True)
        ]
        await self._fill(_Wanted(version, ids, found, [np.arange(len(some)) for some in ids], dtype))
        return found

    async def _fill(self, wanted: _Wanted, refusals: int = 0) -> None:
        routes = self._fleet.routes
        async with SingleErrorGroup() as group:
            for index, chosen in self._router.split_ids(routes, wanted.ids).items():
                part = wanted.where(chosen)
                if any(len(some) for some in part.ids):
                    group.create_task(self._fill_from(index, routes, part, refusals))

    async def _fill_from(self, index: int, routes: Routes, wanted: _Wanted, refusals: int) -> None:
        counts, payload = tuple(len(some) for some in wanted.ids), joined(wanted.ids)
        what = "rows" if wanted.version is None else f"rows of version {wanted.version}"
        backoff = Backoff(f"{what} from pserver-{index}")
        while True:
            await self._fleet.be_certain(backoff)
            request = LookupRequest(
                **self._fleet.envelope(),
                version=wanted.version,
                rows=counts,
                wait_s=LOOKUP_WAIT_S,
                dtype=wanted.dtype,
            )
            try:
                end, rows = await self._fleet.port(index).lookup(request, payload)
            except WrongOwner as error:
                end, rows = LookupEnd(code="WRONG_OWNER", message=error.message), memoryview(b"")
            except (PeerError, StaleGeneration) as error:
                if self._fleet.routes.version != routes.version:
                    await self._fill(wanted, refusals)
                    return
                await self._fleet.suspect(index, error)
                await backoff.failed(error)
                continue
            match end.code:
                case "OK":
                    if rows.nbytes != size_of(
                        counts, self._router.dims, ids=False, rows=True, dtype=wanted.dtype
                    ):
                        raise BadFrame(f"pserver-{index} sent {rows.nbytes} bytes for {sum(counts)} rows")
                    parts = rows_in(rows, counts, self._router.dims, ids=False, dtype=wanted.dtype)
                    for into, place, part in zip(wanted.found, wanted.places, parts, strict=True):
                        into[place if len(place) < len(into) else ALL] = part
                    if end.version is not None:
                        source = routes.version, index
                        self._row_versions[source] = min(
                            end.version, self._row_versions.get(source, end.version)
                        )
                    return
                case "GONE":
                    raise Gone(end.message)
                case "OVERFLOW":
                    hint = f"parameter_dtype is {wanted.dtype}; start the job with another"
                    raise InvalidArgument(end.message, hint=hint)
                case "TOO_EARLY":
                    backoff.waited(end.message)
                case "WRONG_OWNER":
                    await self._fleet.rerouted(routes.version, refusals + 1)
                    await self._fill(wanted, refusals + 1)
                    return
                case "NOT_READY":
                    await backoff.failed(end.message)

    # ------------------------------------------------------------ whole tables

    async def count_rows(self, table: int, version: int | None) -> int:
        """How many rows the table has at the newest version (`version` None: whichever that is), maybe with
        some that are expired. Raises Gone: there is a newer version; DeadlineExceeded: a parameter server
        stays away."""

        async def ask(routes: Routes, index: int) -> int:
            end, _ = await self._portion(routes, index, version, table, self._fleet.layout.slot_count)
            return end.total

        return sum(await self._fleet.ask_all(ask))

    async def whole_table(self, table: int, version: int | None) -> Part:
        """All ids of the table, int64 (n,), ascending, and its rows, float32 (n, dim). `version` and errors
        as in `count_rows`."""
        dim = self._router.dims[table]

        async def ask(routes: Routes, index: int) -> list[Part]:
            found, slot, part = [], 0, 0
            while slot < self._fleet.layout.slot_count:
                end, payload = await self._portion(routes, index, version, table, slot, part)
                if (end.next, end.part) <= (slot, part):
                    raise BadFrame(f"pserver-{index} sent slots {slot} to {end.next} of a table: none at all")
                (ids,) = ids_in(payload, [end.rows], [dim], rows=True)
                (rows,) = rows_in(payload, [end.rows], [dim], ids=True)
                found.append((ids, rows))
                slot, part = end.next, end.part
            return found

        parts = [part for found in await self._fleet.ask_all(ask) for part in found]
        return in_order([ids for ids, _ in parts], [rows for _, rows in parts], dim)

    async def _portion(
        self, routes: Routes, index: int, version: int | None, table: int, first: int, part: int = 0
    ) -> tuple[TableEnd, memoryview]:
        fields = {"version": version, "table": table, "first": first, "part": part, "slots": routes.version}
        request = TableRequest(**self._fleet.envelope(), **fields)
        return await self._fleet.ask(index, lambda port: port.table(request), routes=routes)
