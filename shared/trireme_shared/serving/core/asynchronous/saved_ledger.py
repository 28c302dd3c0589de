"""A ledger as a checkpoint keeps it (pserver_service/checkpoints/ledger_text.py writes and reads it)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import EpochLedger


@dataclass(frozen=True, slots=True)
class SavedTask:
    """`next[i]`: minibatch that position i expects, of `minibatches`."""

    minibatches: int
    next: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """`applied[i]`: minibatches applied to position i. `closed`: chunk -> bits, as core/asynchronous/ledger.py has them."""

    applied: tuple[int, ...]
    open: Mapping[int, SavedTask]
    closed: Mapping[int, int]
    duplicates: int


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """`old`: epochs with counts only. Positions are those of the blocks, then those of `slots`, see core/asynchronous/ledger.py."""

    epochs: Mapping[int, SavedEpoch]
    old: tuple[EpochLedger, ...] = ()
    slots: tuple[int, ...] = ()


class AsyncSnapshot(Snapshot):
    """All blocks and rows at one instant, and their ledger. `updates`: how many they had had by then."""

    def __init__(
        self,
        record: StepRecord,
        blocks: Iterable[int],
        ledger: SavedLedger,
        updates: int,
        slots: SlotMap | None = None,
    ) -> None:
        super().__init__(record, 0, blocks, slots)
        self.ledger, self.updates = ledger, updates

    @property
    def rows_version(self) -> int | None:
        """Of its rows; None: it has none."""
        return self.tables[0].version if self.tables else None
