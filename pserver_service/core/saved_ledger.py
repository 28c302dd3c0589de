"""A ledger as a checkpoint keeps it (pserver_service/checkpoints/ledger_text.py writes and reads it)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.blocks.snapshot import Snapshot
from shared.records import SlotMap
from shared.records.step import StepRecord
from shared.wire.messages import EpochLedger


@dataclass(frozen=True, slots=True)
class SavedTask:
    """`next[i]`: minibatch that block i expects, of `minibatches`."""

    minibatches: int
    next: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """`applied[i]`: minibatches applied to block i. `closed`: chunk -> bits, as core/ledger.py has them."""

    applied: tuple[int, ...]
    open: Mapping[int, SavedTask]
    closed: Mapping[int, int]
    duplicates: int


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """`old`: epochs with counts only."""

    epochs: Mapping[int, SavedEpoch]
    old: tuple[EpochLedger, ...] = ()


class AsyncSnapshot(Snapshot):
    """All blocks at one instant, and their ledger. `updates`: how many the blocks had had by then."""

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
