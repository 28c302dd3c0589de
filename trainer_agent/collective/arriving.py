"""Mean gradients on their way to one trainer: kept apart until all of them are there, then its store has the version.

pull ─staging─► own memory of each block ─all blocks, the generation is still the same─► MeanStore.complete
                    `─ another generation: given back, whatever came is thrown away
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shared.blocks.buffer_mean import bits_of
from shared.blocks.buffers import Buffer, tensor_over
from shared.errors import StaleGeneration
from shared.records.job_spec import Narrow
from shared.records.layout import Layout
from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.server import ShareServer

if TYPE_CHECKING:
    from trainer_agent.collective.rows.means import RowMeans


class Arriving:
    """What a pull of the version after `store.has` brings, asked in the server's present generation, which began at version `newest`. As the vectors of a compute.
    `shares`: which rows are asked for, those of each owner's slots (see TableRequest.slots); 0: one trainer gives all. `release` it at the end."""

    def __init__(self, server: ShareServer, store: MeanStore, newest: int) -> None:
        self._server, self._store = server, store
        self.generation, self.version = server.generation, store.has + 1
        self.shares = self.generation if self.version > newest else 0
        self.layout: Layout = store.layout
        self.blocks: dict[int, Buffer | None] = {}
        self.rows: dict[int, RowMeans] = {}  # by place of the owner, see MeanRows.complete

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

    def swap(self) -> None:
        """The store does that."""

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
