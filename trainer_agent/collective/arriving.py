"""Mean gradients on their way to one trainer: kept apart until all of them are there, then the trainer's store has the version.

pull ─staging─► own memory of each block ─all blocks, the generation is still the same─► MeanStore.complete
                    `─ another generation: given back, whatever came is thrown away
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.server import ShareServer
from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.waiting import Backoff
from trireme_shared.blocks.buffer_mean import bits_of
from trireme_shared.blocks.buffers import Buffer, tensor_over
from trireme_shared.protocol.errors import BadFrame, PeerError, StaleGeneration
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.wire.messages import RowMeansPart, TableRequest
from trireme_shared.tables.hashing import Ids
from trireme_shared.tables.payload import Rows, ids_in, rows_in

if TYPE_CHECKING:
    from trainer_agent.collective.rows import RowMeans


class Arriving:
    """A PullSink: what a pull of the version after `store.has` brings, asked in the server's present generation, which began at version
    `newest`. `release` it at the end."""

    def __init__(self, server: ShareServer, store: MeanStore, newest: int) -> None:
        self._server, self._store = server, store
        self.generation, self.version = server.generation, store.has + 1
        #: which rows are asked for: those of each owner's slots (see TableRequest.slots); 0: one trainer gives all
        self.shares = self.generation if self.version > newest else 0
        self.layout: Layout = store.layout
        self.blocks: dict[int, Buffer | None] = {}
        self.rows: dict[int, RowMeans] = {}  # by place of the owner, see MeanRows.complete
        self._dims = [spec.dim for spec in store.layout.tables]

    def __repr__(self) -> str:
        return f"<Arriving version {self.version} in generation {self.generation}: {len(self.blocks)} blocks>"

    @property
    def is_over(self) -> bool:
        """Whether the generation has ended, or the trainer has other blocks."""
        return self._server.generation != self.generation or self._server.store is not self._store

    def check(self) -> None:
        """Raises StaleGeneration: what was asked, and what came, does not count any more."""
        if self.is_over:
            msg = f"generation {self.generation} is over, so version {self.version} is pulled again in {self._server.generation}"
            raise StaleGeneration(msg)

    def staging(self, block: int) -> memoryview:
        """Writable bytes for a block; also while an answer to a call of a generation that is over still comes."""
        return self._buffer(block).view

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        self._buffer(block).tensor.copy_(tensor_over(payload, dtype))

    def keep(self, block: int) -> None:
        """It has no gradient; or it is a buffer that is as it was."""
        state = self._store.blocks[block]
        values = state.kept.get(self.version - 1) if state.is_buffer else None
        self._put(block, values.retain() if values is not None else None)

    def may_keep(self, block: int, *, named: bool) -> bool:
        """A mean gradient may always come without values: no lane had data."""
        return named or not self._store.blocks[block].is_buffer

    def tensor(self, block: int) -> torch.Tensor:
        """The same memory as `staging`, in the block's dtype."""
        return self._buffer(block).tensor

    def take_buffer(self, block: int, mean: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """A block of buffers: its mean, made of its values at the version before; None: it stays as it is."""
        before = self._store.blocks[block].kept[self.version - 1]
        assert before is not None
        value = mean(before.tensor)
        if value is None or torch.equal(bits_of(value), bits_of(before.tensor)):
            self.keep(block)
        else:
            self._buffer(block).tensor.copy_(value)

    def complete(self) -> dict[int, Buffer | None]:
        """All of it; the caller has the references now."""
        found, self.blocks = self.blocks, {}
        return found

    def release(self) -> None:
        """Nothing of it is needed."""
        for buffer in self.complete().values():
            if buffer is not None:
                buffer.release()

    # ------------------------------------------------------------ rows of embedding tables

    @property
    def row_means(self) -> int | None:
        return self.shares if self._dims else None

    def take_row_means(self, index: int, found: RowMeansPart) -> None:
        from trainer_agent.collective.rows import RowMeans  # noqa: PLC0415  loads numba

        self.check()
        payload = bytearray(found.payload)  # loops are compiled for arrays that can be written
        ids = ids_in(payload, found.counts, self._dims, rows=True)
        rows = rows_in(payload, found.counts, self._dims, ids=True)
        self.rows[self._place_of_rows(index)] = RowMeans(ids, rows, found.has_data)

    async def pull_rows(self, fleet: FleetClient, place: int) -> None:
        """Bring the mean gradients of rows from a trainer that has the whole version of its blocks, unless they came with the end of the pull.
        Raises StaleGeneration: the generation is over."""
        if self._dims and self._place_of_rows(place) not in self.rows:  # they are many
            self.check()
            self.rows[self._place_of_rows(place)] = await self._row_means(fleet, place)

    async def _row_means(self, fleet: FleetClient, place: int) -> RowMeans:
        """Of all tables: one request, more only if they are large."""
        from trainer_agent.collective.rows import RowMeans  # noqa: PLC0415  loads numba

        backoff = Backoff(f"mean gradients of rows from the trainer at place {place}")
        parts, first = list[tuple[list[Ids], list[Rows]]](), 0
        while True:
            self.check()
            fields = {"version": self.version, "table": 0, "first": first, "slots": self.shares}
            try:
                end, payload = await fleet.port(place).table(TableRequest(**fleet.envelope(), **fields))
            except (PeerError, StaleGeneration) as error:
                self.check()
                await fleet.suspect(place, error)
                await backoff.failed(error)
                continue
            ids = ids_in(payload, end.counts, self._dims, rows=True)
            parts.append((ids, rows_in(payload, end.counts, self._dims, ids=True)))
            if end.next >= end.total:
                self.check()
                if len(parts) > 1:
                    ids, rows = (
                        [np.concatenate(each) for each in zip(*some, strict=True)] for some in zip(*parts, strict=True)
                    )
                else:
                    ids, rows = parts[0]
                return RowMeans(ids, rows, end.has_data)
            if end.next <= first:
                raise BadFrame(f"the trainer at place {place} sent no mean gradients of rows from the {first}th on")
            first = end.next

    def _place_of_rows(self, place: int) -> int:
        """As in `rows`."""
        from trainer_agent.collective.rows import WHOLE_PLACE  # noqa: PLC0415  loads numba

        return place if self.shares else WHOLE_PLACE

    def _buffer(self, block: int) -> Buffer:
        found = self.blocks.get(block)
        if found is None:
            place = self._store.blocks[block].place
            found = self._store.pool.take(place.dtype, place.elements)
            self._put(block, found)
        return found

    def _put(self, block: int, buffer: Buffer | None) -> None:
        if (before := self.blocks.get(block)) is not None:
            before.release()
        self.blocks[block] = buffer
