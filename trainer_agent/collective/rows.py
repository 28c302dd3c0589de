"""Embedding tables in one trainer of a collective job: mean gradients of rows beside those of blocks, and the
rows of all slots that it steps with them.

    own share     gradients of all lanes for the own slots --tree--> `shares[s + 1]`
                  (as a parameter server, without rows)
    all slots     shares of all owners, put together: `whole[s + 1]`, kept as long as the blocks' mean
                  gradients are
    version s     --step_rows: mean gradients of the rows of all slots--> version s + 1
                  rows of version s can be read until the next step

The rows are stepped as parameter servers step theirs, to the same bits: they take the mean as the gradient of
the only lane. This module loads numba, so it is imported only where there are tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer_agent.tables.files import in_order
from trireme_shared.checkpoints.start_tables import fit_tables, mark_in, put_rows
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import Gone, InvalidArgument, NotReady
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import RowMeansPart, TableEnd, TableRequest, Verdict
from trireme_shared.serving.core.table.rows import RowsPart, TableRows
from trireme_shared.tables.lanes import means_over_lanes
from trireme_shared.tables.memory import Floats, Numbers
from trireme_shared.tables.payload import ID_BYTES, NUMBER_BYTES, joined
from trireme_shared.tables.table import joined as joined_slots
from trireme_shared.tables.table import living

WHOLE_PLACE = -1  # in place of one owner: it gave all slots
PORTION_BYTES = 16 << 20  # in one answer
SMALL_BYTES = 32 << 10  # they come with the end of a pull: less than a header may have
TURN_S = 0.002  # of a step, before the event loop has its turn
KEPT_S = 0.01  # between two looks whether a snapshot is written far enough
LOOK_S = 0.1  # between two looks whether the trainer has other rows now


@dataclass(frozen=True, slots=True)
class RowMeans:
    """Of one step. `ids`: of each table int64 (n,), ascending; `gradients`: float32 (n, dim). `has_data`:
    whether any lane had records."""

    ids: Sequence[Numbers]
    gradients: Sequence[Floats]
    has_data: bool

    @property
    def bytes(self) -> int:
        return sum(ids.nbytes for ids in self.ids) + sum(rows.nbytes for rows in self.gradients)


def put_together(parts: Sequence[RowMeans], dims: Sequence[int]) -> RowMeans:
    """Shares of one step that have no id in common."""
    if len(parts) == 1:
        return parts[0]
    found = [
        in_order([part.ids[table] for part in parts], [part.gradients[table] for part in parts], dim)
        for table, dim in enumerate(dims)
    ]
    return RowMeans(
        [ids for ids, _ in found], [rows for _, rows in found], any(part.has_data for part in parts)
    )


class MeanRows(TableRows):
    """By version: `shares` of the own slots in the present generation, `whole` of all slots. It has no rows:
    its tables stay empty."""

    def __init__(self, layout: Layout, lanes: int, version: int) -> None:
        tables = tuple(
            spec.with_fields(max_rows=None, admit_after=1, evict_after_steps=None) for spec in layout.tables
        )
        super().__init__(layout.with_fields(tables=tables), lanes, version)
        self.shares: dict[int, RowMeans] = {}
        self.whole: dict[int, RowMeans] = {}

    def __repr__(self) -> str:
        there = f"{len(self._main.waiting)} of {self.lanes} lanes"
        return f"<MeanRows version {self.version}: {there}, all slots of versions {sorted(self.whole)}>"

    def _step(self, part: RowsPart, factor: float) -> Iterator[None]:  # noqa: ARG002
        """In one go (ShareServer.step_rows): whatever a new generation ends, it is no half of a step."""
        lanes, found = [part.waiting[lane] for lane in range(self.lanes)], []
        for number, dim in enumerate(self.dims):
            ids, gradients = yield from means_over_lanes([lane[number] for lane in lanes], dim)
            found.append(
                (ids.copy(), np.empty((0, dim), np.float32) if gradients is None else gradients.copy())
            )
        has_data = any(rows.count for lane in lanes for rows in lane)
        part.waiting = {}
        part.version += 1
        self.shares[part.version] = RowMeans([ids for ids, _ in found], [rows for _, rows in found], has_data)

    def start_again(self, version: int) -> None:
        """Another generation: the step after `version` begins again, and the shares of slots are others."""
        self._main.waiting, self._main.version = {}, version
        self.shares = {}
        self.whole = {each: means for each, means in self.whole.items() if each <= version}

    def complete(self, version: int, arrived: Mapping[int, RowMeans]) -> None:
        """All slots are there. `arrived`: by place of the owner; the own share is here, unless one trainer
        gave all slots (WHOLE_PLACE)."""
        parts = list(arrived.values())
        if WHOLE_PLACE not in arrived and version in self.shares:
            parts.append(self.shares[version])
        self.whole[version] = put_together(parts, self.dims)
        if self.version < version:
            self._main.waiting, self._main.version = {}, version

    def forget_before(self, version: int) -> None:
        for kept in (self.shares, self.whole):
            for older in [each for each in kept if each < version]:
                del kept[older]

    def small_means(self, version: int, slots: int) -> RowMeansPart | None:
        """What `portion_of_means` finds; None: it is not there, or too large for the end of a pull. `slots`:
        see PullRequest.row_means."""
        found = (self.shares if slots else self.whole).get(version)
        if found is None or found.bytes > SMALL_BYTES:
            return None
        payload = joined(found.ids, found.gradients)
        return RowMeansPart(
            counts=tuple(map(len, found.ids)), payload=bytes(payload), has_data=found.has_data
        )

    def portion_of_means(self, request: TableRequest) -> tuple[TableEnd, memoryview]:
        """Of all tables, one after the other, as many as go into one answer. Raises InvalidArgument;
        NotReady: not yet; Gone: not any more."""
        if request.version is None:
            raise InvalidArgument("mean gradients of rows are those of a version, and none was asked for")
        found = (self.shares if request.slots else self.whole).get(request.version)
        if found is None:
            what = f"mean gradients of rows that made version {request.version}"
            if request.version > self.version:
                raise NotReady(f"{what} are not there: the rows are at version {self.version}; ask again")
            raise Gone(f"{what} are not kept: the rows are at version {self.version}")
        ids, gradients, passed, left = [], [], request.first, PORTION_BYTES
        for dim, of_table, rows in zip(self.dims, found.ids, found.gradients, strict=True):
            first, size = min(passed, len(of_table)), ID_BYTES + NUMBER_BYTES * dim
            last = min(len(of_table), first + max(left // size, left == PORTION_BYTES))
            ids.append(of_table[first:last])
            gradients.append(rows[first:last])
            passed -= first
            left = left - (last - first) * size if last == len(of_table) else 0
        counts = tuple(map(len, ids))
        count, total = sum(counts), sum(map(len, found.ids))
        end = TableEnd(
            rows=count, counts=counts, next=request.first + count, total=total, has_data=found.has_data
        )
        return end, joined(ids, gradients)

    # ------------------------------------------------------------ it has no rows

    def judge(self, version: int | None) -> Verdict | None:  # noqa: ARG002
        return Verdict.GONE

    def lookup(self, version: int | None, ids: Sequence[Numbers], dtype: Narrow | None = None) -> memoryview:  # noqa: ARG002
        raise _no_rows()

    def rows_in_table(self, number: int) -> int:  # noqa: ARG002
        raise _no_rows()


def _no_rows() -> InvalidArgument:
    return InvalidArgument(
        "a trainer of a collective job gives mean gradients of rows; each trainer has the rows itself"
    )


class ReplicaRows(TableRows):
    """Those of one trainer. `moved`: set after each step; who waits for one clears it."""

    def __init__(self, layout: Layout, version: int) -> None:
        super().__init__(layout, 1, version)
        self.moved = asyncio.Event()


def new_rows(layout: Layout, version: int) -> ReplicaRows:
    """Without any row yet."""
    return ReplicaRows(layout, version)


async def step_rows(rows: ReplicaRows, means: RowMeans, lane_zero: LaneZero | None) -> None:
    """In place: the next version. `lane_zero`: of the step, with the options of the optimizer's groups in it.
    Must not be cancelled."""
    verdict = rows.push(rows.version, 0, means.ids, means.gradients, int(means.has_data))
    assert verdict is Verdict.APPLIED, (verdict, rows)
    while not rows.kept.may_step(rows.snapshots, clock.monotonic()):  # noqa: ASYNC110  a thread writes
        await asyncio.sleep(KEPT_S)
    until = clock.monotonic() + TURN_S
    for _ in rows.steps(lane_zero):
        if clock.monotonic() >= until:
            await asyncio.sleep(0)
            until = clock.monotonic() + TURN_S
    for table in rows.tables:
        table.removed.forget(rows.version)  # there are no deltas
    rows.moved.set()


async def rows_at(
    own: Callable[[], ReplicaRows], version: int | None, ids: Sequence[Numbers]
) -> list[Floats]:
    """Of each table float32 (n, dim), at `version` (None: the newest one), once it is there: after the step
    that makes it. `own()`: the trainer's rows. Raises Gone: it is not kept, or the trainer has other rows by
    then (the job went back)."""
    rows = own()
    while (verdict := rows.judge(version)) is Verdict.TOO_EARLY:
        rows.moved.clear()
        await event_within(rows.moved, LOOK_S)
        if own() is not rows:
            raise Gone(f"the job went back while version {version} of its rows was waited for: join again")
    if verdict is not None:
        raise Gone(f"the tables are at version {rows.version}, {version} was asked: join again")
    found = []
    for table, some in zip(rows.tables, ids, strict=True):
        found.append(np.empty((len(some), table.spec.dim), np.float32))
        table.lookup(some, found[-1], version)
    return found


def whole_table(rows: TableRows, number: int, version: int | None) -> tuple[Numbers, Floats]:
    """int64 (n,), ascending, and float32 (n, dim); copies, without expired rows. Raises Gone: there is a
    newer version."""
    if rows.changing or version not in (None, rows.version):
        raise Gone(
            f"the tables are at version {rows.version}, {version} was asked: whole tables are read "
            "at the newest"
        )
    if number >= len(rows.tables):
        raise InvalidArgument(f"table {number} was asked for: the model has {len(rows.tables)}")
    table = rows.tables[number]
    found = living(
        joined_slots([table.read_slot(slot) for slot in table.slots()], table.width),
        table.spec,
        table.version,
    )
    return found.ids, np.ascontiguousarray(found.content[:, : table.spec.dim])


def put_start_rows(rows: TableRows, layout: Layout, init_from: str | None, states: bool) -> None:
    """Rows that the tables start with (`init_from`): each trainer that has version 0 reads all of them
    itself, in place. Blocks. `states`: with the state of their optimizers. Raises InvalidArgument: the files
    were changed since this trainer made its model; OSError."""
    fit, mark = fit_tables(layout.tables, init_from or "", states=states), mark_in(layout.initial)
    if (here := fit.mark()) != mark:
        msg = (
            f"the tables beside {init_from} were changed while the job began (mark {here or 'none'}, "
            f"it was {mark})"
        )
        raise InvalidArgument(msg, hint="start a new job for new files", fatal=True)
    tables = {table.spec.name: table for table in rows.tables}
    for start in fit.tables:
        put_rows(tables[start.name], start)
