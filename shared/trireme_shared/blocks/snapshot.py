"""The copy of one version: each block is added when it reaches the version.

    version due --first block--> collecting --last block--> whole --taken--> written, released

Values are never changed in place in synchronous mode, so a snapshot only retains their buffer; the
optimizer's state is copied. In asynchronous mode all blocks are added as they were at one instant; updates go
into new buffers while the snapshot is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trireme_shared.blocks.buffers import Buffer, BufferPool
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord


@dataclass(frozen=True, slots=True)
class SavedTensor:
    buffer: Buffer
    shape: tuple[int, ...]


class TableSnapshot(Protocol):
    """See trireme_shared.tables.snapshot."""

    version: int

    def close(self) -> None: ...


class Snapshot:
    """`tensors`: by the names they have in the file, `block.<n>` and `block.<n>.<state>`. `slots`: the map
    that gave these blocks to their owner (None: not known). A checkpoint consists of parts of one map.
    `tables`: in the layout's order."""

    def __init__(
        self, record: StepRecord, rank: int, blocks: Iterable[int], slots: SlotMap | None = None
    ) -> None:
        self.record = record
        self.rank = rank
        self.slots = slots
        self.tensors: dict[str, SavedTensor] = {}
        self.tables: Sequence[TableSnapshot] = ()
        self.blocks = tuple(blocks)
        self._missing = set(self.blocks)

    def __repr__(self) -> str:
        return (
            f"<Snapshot of version {self.version}: {len(self.tensors)} tensors, {len(self._missing)} "
            "blocks missing>"
        )

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def rows_version(self) -> int | None:
        """By which its rows are stamped; None: by the version."""
        return None

    @property
    def whole(self) -> bool:
        return not self._missing

    def lacks(self, number: int) -> bool:
        """Whether a block of it is not added yet."""
        return number in self._missing

    def add(self, number: int, values: Buffer, state: Mapping[str, torch.Tensor], pool: BufferPool) -> None:
        """Copy a block that has just reached this version; `state`: its optimizer's."""
        self._missing.remove(number)
        self.tensors[f"block.{number}"] = SavedTensor(values.retain(), (values.tensor.numel(),))
        for name, tensor in state.items():
            copy = pool.take(str(tensor.dtype).removeprefix("torch."), tensor.numel())
            copy.tensor.copy_(tensor.reshape(-1))
            self.tensors[f"block.{number}.{name}"] = SavedTensor(copy, tuple(tensor.shape))

    def add_tables(self, tables: Sequence[TableSnapshot]) -> None:
        """Of the embedding tables, which have just reached this version; they are `ROWS` among the blocks."""
        self._missing.remove(ROWS)
        self.tables = tables

    def renew_tables(self, tables: Sequence[TableSnapshot]) -> None:
        """Other copies of the same rows, in place of those that were read."""
        for table in self.tables:
            table.close()
        self.tables = tables

    def release(self) -> None:
        """Give its memory back; it must not be read any more."""
        for table in self.tables:
            table.close()
        self.tables = ()
        for saved in self.tensors.values():
            saved.buffer.release()
        self.tensors = {}
