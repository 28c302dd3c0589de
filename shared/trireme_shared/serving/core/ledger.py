"""The ledger of asynchronous training: the next minibatch that each block expects of each open task, so each
is applied once.

    open(next per block) --every block has every minibatch--> closed (one bit per task)
        --epoch is old--> counts only

Rows of embedding tables are like blocks, slot by slot. Slots that have had the same minibatches share a
position behind those of the blocks: at first all of them; after slots came from several parameter servers,
those that were even at that moment.

A push of minibatches [start, end): start < next is a duplicate, start > next is too early, else it is due.
A copy of it goes into each part of a checkpoint (`saved`) and comes back from any number of them (`loaded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import EpochLedger, LedgerAnswer, PushHeader, Verdict


@dataclass(frozen=True, slots=True)
class SavedTask:
    """`next[i]`: minibatch that position i expects, of `minibatches`."""

    minibatches: int
    next: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """`applied[i]`: minibatches applied to position i. `closed`: chunk -> bits, as EpochDetail has them."""

    applied: tuple[int, ...]
    open: Mapping[int, SavedTask]
    closed: Mapping[int, int]
    duplicates: int


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """A ledger as a checkpoint keeps it (pserver_service/checkpoints/ledger_text.py writes and reads it).
    `old`: epochs with counts only. Positions are those of the blocks, then those of `slots`, see Ledger."""

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


EPOCHS_IN_DETAIL = 2
_CHUNK = 1024  # bits per entry of a sparse bitmap
_ALL = 1 << 60  # minibatches of a closed task, whose number is not known


@dataclass(slots=True)
class OpenTask:
    """`next[i]`: minibatch that position i expects; `unfinished`: positions that miss some.

    `minibatches` is 0 until the first push, if the task is known from a checkpoint only."""

    minibatches: int
    next: list[int]
    unfinished: int
    attempt: int = 0


@dataclass(slots=True)
class EpochDetail:
    """`applied[i]`: minibatches applied to position i in this epoch."""

    applied: list[int]
    open: dict[int, OpenTask] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    closed_count: int = 0
    duplicates: int = 0

    def is_closed(self, task: int) -> bool:
        return bool(self.closed.get(task // _CHUNK, 0) >> (task % _CHUNK) & 1)

    def close(self, task: int) -> None:
        del self.open[task]
        self.closed[task // _CHUNK] = self.closed.get(task // _CHUNK, 0) | 1 << (task % _CHUNK)
        self.closed_count += 1


class Ledger:
    """The ledger of one pserver. A block is named by its position among its blocks, 0 … blocks - 1. `slots`:
    bits of the slots whose rows are at position blocks, blocks + 1, …"""

    def __init__(self, blocks: int, slots: Sequence[int] = ()) -> None:
        self._blocks, self.slots = blocks, tuple(slots)
        self._positions = blocks + len(self.slots)
        self._epochs: dict[int, EpochDetail] = {}
        self._old: dict[int, EpochLedger] = {}

    def __repr__(self) -> str:
        return (
            f"<Ledger of {self._blocks} blocks, rows {len(self.slots)}: "
            f"{[entry.model_dump() for entry in self.counts()]}>"
        )

    @property
    def rows(self) -> range:
        """Positions of rows, in the order of `slots`."""
        return range(self._blocks, self._positions)

    def judge(self, push: PushHeader, task: int, block: int) -> Verdict:
        """Whether this push is due at this position. Changes only counts, attempts and the set of open
        tasks."""
        detail = self.detail_of(push.epoch)
        if detail is None:
            counts = self._old.get(push.epoch) or _counts_of(push.epoch, EpochDetail([]))
            self._old[push.epoch] = counts.with_fields(duplicates=counts.duplicates + 1)
            return Verdict.DUPLICATE
        if detail.is_closed(task):
            detail.duplicates += 1
            return Verdict.DUPLICATE
        entry = detail.open.get(task)
        if entry is None:
            entry = detail.open[task] = OpenTask(push.minibatches, [0] * self._positions, self._positions)
        if not entry.minibatches:
            entry.minibatches = push.minibatches
        if push.minibatches != entry.minibatches:
            return Verdict.BAD_FRAME
        if push.attempt < entry.attempt:
            return Verdict.STALE_ATTEMPT
        entry.attempt = push.attempt
        if push.start < entry.next[block]:
            detail.duplicates += 1
            return Verdict.DUPLICATE
        return Verdict.TOO_EARLY if push.start > entry.next[block] else Verdict.APPLIED

    def enter(self, push: PushHeader, task: int, block: int) -> None:
        """Record a push that was due and is applied."""
        detail = self._epochs.get(push.epoch)
        if detail is None:  # the epoch became old while rows were stepped: it has counts alone
            return
        entry = detail.open[task]
        entry.next[block] = push.end
        detail.applied[block] += push.end - push.start
        if push.end == entry.minibatches:
            entry.unfinished -= 1
            if entry.unfinished == 0:
                detail.close(task)

    def next_of(self, epoch: int, task: int) -> LedgerAnswer:
        """The lowest minibatch that a block or row still expects; a pserver without any expects none."""
        detail = self._epochs.get(epoch)
        if detail is None:
            over = bool(self._epochs) and epoch < min(self._epochs)
            return LedgerAnswer(closed=over or self._positions == 0)
        if detail.is_closed(task):
            return LedgerAnswer(closed=True)
        entry = detail.open.get(task)
        return LedgerAnswer(next=min(entry.next) if entry else 0)

    # ------------------------------------------------------------ checkpoints

    def saved(self) -> SavedLedger:
        """A copy for a checkpoint."""
        epochs = {
            epoch: SavedEpoch(
                applied=tuple(detail.applied),
                open={
                    task: SavedTask(entry.minibatches, tuple(entry.next))
                    for task, entry in detail.open.items()
                },
                closed=dict(detail.closed),
                duplicates=detail.duplicates,
            )
            for epoch, detail in self._epochs.items()
        }
        return SavedLedger(epochs, tuple(self._old[epoch] for epoch in sorted(self._old)), self.slots)

    def part(self, blocks: Sequence[int], slots: int = 0, *, stays: bool = False) -> SavedLedger:
        """A copy for some of the blocks (their positions), and for the rows of some slots (bits). `stays`:
        counts of duplicates do not move."""
        saved, groups = self.saved(), [bits & slots for bits in self.slots]
        positions = [*blocks, *(place for place, bits in zip(self.rows, groups, strict=True) if bits)]
        epochs = {
            epoch: SavedEpoch(
                applied=tuple(entry.applied[position] for position in positions),
                open={
                    task: SavedTask(held.minibatches, tuple(held.next[position] for position in positions))
                    for task, held in entry.open.items()
                },
                closed=entry.closed,
                duplicates=entry.duplicates if stays else 0,
            )
            for epoch, entry in saved.epochs.items()
        }
        old = saved.old if stays else tuple(entry.with_fields(duplicates=0) for entry in saved.old)
        return SavedLedger(epochs, old, tuple(bits for bits in groups if bits))

    @classmethod
    def joined(cls, parts: Sequence[tuple[SavedLedger, int]]) -> Ledger:
        """The ledger of blocks and rows that come from several parameter servers: each part with its number
        of blocks. No slot is in two parts."""
        return cls.loaded(
            [(saved, position) for saved, blocks in parts for position in range(blocks)],
            [
                (saved, blocks + place, bits)
                for saved, blocks in parts
                for place, bits in enumerate(saved.slots)
            ],
        )

    @classmethod
    def loaded(
        cls, blocks: Sequence[tuple[SavedLedger, int]], rows: Sequence[tuple[SavedLedger, int, int]] = ()
    ) -> Ledger:
        """The ledger of these blocks, each given as (the part's ledger, its position there), and of the
        `rows` of these slots (bits, the third).

        A task is closed if it is closed in all parts. An epoch that is old for one of them is over, so it is
        old for all. Attempts start at 0: the generation fences pushes from before the rollback.
        """
        given = {
            id(saved): saved for saved in [*(each for each, _ in blocks), *(each for each, _, _ in rows)]
        }
        over = {entry.epoch for saved in given.values() for entry in saved.old}
        aligned = {name: _without(saved, over) for name, saved in given.items()}
        blocks = [(aligned[id(saved)], position) for saved, position in blocks]
        rows = [(aligned[id(saved)], position, bits) for saved, position, bits in rows]
        groups = _alike(rows)
        ledger = cls(len(blocks), [bits for _, _, bits in groups])
        places = [*blocks, *((saved, position) for saved, position, _ in groups)]
        parts = list(aligned.values())
        for epoch in sorted({epoch for part in parts for epoch in part.epochs}):
            ledger._epochs[epoch] = _joined(epoch, parts, places)
        ledger._old = {epoch: _counts_together(epoch, parts) for epoch in sorted(over)}
        while len(ledger._epochs) > EPOCHS_IN_DETAIL:
            oldest = min(ledger._epochs)
            ledger._old[oldest] = _counts_of(oldest, ledger._epochs.pop(oldest))
        return ledger

    def positions(self, tasks: Mapping[int, int]) -> dict[int, int]:
        """Task -> minibatches that all blocks have, -1 for a closed task. `tasks`: task -> epoch."""
        answers = {task: self.next_of(epoch, task) for task, epoch in tasks.items()}
        return {task: -1 if answer.closed else answer.next for task, answer in answers.items()}

    def counts(self) -> tuple[EpochLedger, ...]:
        """Counts of all epochs, oldest first."""
        detailed = [_counts_of(epoch, detail) for epoch, detail in self._epochs.items()]
        return tuple(sorted([*self._old.values(), *detailed], key=lambda entry: entry.epoch))

    def detail_of(self, epoch: int) -> EpochDetail | None:
        """The epoch's detail, made if the epoch is new. None if only counts are left: the master starts an
        epoch when every task of the epochs before is closed or discarded, so pushes of old epochs are
        late."""
        detail = self._epochs.get(epoch)
        if detail is not None or epoch in self._old or (self._epochs and epoch < min(self._epochs)):
            return detail
        detail = self._epochs[epoch] = EpochDetail([0] * self._positions)
        while len(self._epochs) > EPOCHS_IN_DETAIL:
            oldest = min(self._epochs)
            self._old[oldest] = _counts_of(oldest, self._epochs.pop(oldest))
        return self._epochs.get(epoch)


def _counts_of(epoch: int, detail: EpochDetail) -> EpochLedger:
    return EpochLedger(
        epoch=epoch,
        applied_lowest=min(detail.applied, default=0),
        applied_highest=max(detail.applied, default=0),
        tasks_closed=detail.closed_count,
        tasks_open=len(detail.open),
        duplicates=detail.duplicates,
    )


def _counts_together(epoch: int, parts: Sequence[SavedLedger]) -> EpochLedger:
    """Of an old epoch. A part that knows nothing of it has had nothing of it."""
    nothing = _counts_of(epoch, EpochDetail([]))
    of = [next((entry for entry in part.old if entry.epoch == epoch), nothing) for part in parts]
    return EpochLedger(
        epoch=epoch,
        applied_lowest=min(entry.applied_lowest for entry in of),
        applied_highest=max(entry.applied_highest for entry in of),
        tasks_closed=min(entry.tasks_closed for entry in of),
        tasks_open=max(entry.tasks_open for entry in of),
        duplicates=sum(entry.duplicates for entry in of),
    )


def _joined(
    epoch: int, parts: Sequence[SavedLedger], blocks: Sequence[tuple[SavedLedger, int]]
) -> EpochDetail:
    """One epoch's detail from several parts."""
    nothing_known = SavedEpoch(applied=(), open={}, closed={}, duplicates=0)
    of = {id(part): part.epochs.get(epoch, nothing_known) for part in parts}
    mine = [(of[id(saved)], position) for saved, position in blocks]
    detail = EpochDetail([saved.applied[position] if saved.applied else 0 for saved, position in mine])
    detail.duplicates = sum(saved.duplicates for saved in of.values())
    everywhere = _intersection([saved.closed for saved in of.values()])
    detail.closed = {chunk: bits for chunk, bits in everywhere.items() if bits}
    detail.closed_count = sum(bits.bit_count() for bits in detail.closed.values())
    for task in sorted(
        {task for saved in of.values() for task in (*saved.open, *_tasks(saved.closed, everywhere))}
    ):
        known = next((saved.open[task].minibatches for saved in of.values() if task in saved.open), 0)
        next_of = [_next(saved, position, task) for saved, position in mine]
        unfinished = sum(each < (known or _ALL) for each in next_of)
        detail.open[task] = OpenTask(known, next_of, unfinished)
        if not unfinished:
            detail.close(task)
    return detail


def _alike(rows: Sequence[tuple[SavedLedger, int, int]]) -> list[tuple[SavedLedger, int, int]]:
    """Slots that have had the same minibatches, together."""
    found: dict[object, tuple[SavedLedger, int, int]] = {}
    for saved, position, bits in rows:
        of_epochs = ((epoch, _history(entry, position)) for epoch, entry in sorted(saved.epochs.items()))
        history = tuple((epoch, had) for epoch, had in of_epochs if any(had))
        first, place, before = found.get(history, (saved, position, 0))
        found[history] = first, place, before | bits
    return [group for group in found.values() if group[2]]


def _history(saved: SavedEpoch, position: int) -> tuple[object, ...]:
    """What a position has had of an epoch, whether the tasks are closed already or wait for other
    positions."""
    done, partly = dict(saved.closed), []
    for task, held in saved.open.items():
        if held.next[position] >= (held.minibatches or _ALL):
            done[task // _CHUNK] = done.get(task // _CHUNK, 0) | 1 << (task % _CHUNK)
        elif held.next[position]:
            partly.append((task, held.next[position]))
    return (
        saved.applied[position],
        tuple(sorted(partly)),
        tuple(sorted(entry for entry in done.items() if entry[1])),
    )


def _next(saved: SavedEpoch, position: int, task: int) -> int:
    entry = saved.open.get(task)
    if entry is not None:
        return entry.next[position]
    return _ALL if saved.closed.get(task // _CHUNK, 0) >> (task % _CHUNK) & 1 else 0


def _intersection(bitmaps: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Bits that are set in all of them."""
    first, *others = bitmaps
    common = dict(first)
    for other in others:
        common = {chunk: bits & other.get(chunk, 0) for chunk, bits in common.items()}
    return common


def _tasks(bitmap: Mapping[int, int], without: Mapping[int, int]) -> list[int]:
    """The tasks of a bitmap that are not in `without`."""
    tasks = []
    for chunk, bits in bitmap.items():
        left = bits & ~without.get(chunk, 0)
        while left:
            tasks.append(chunk * _CHUNK + (left & -left).bit_length() - 1)
            left &= left - 1
    return tasks


def _without(saved: SavedLedger, over: set[int]) -> SavedLedger:
    """With counts only for the epochs that are over."""
    old = {entry.epoch: entry for entry in saved.old}
    for epoch in saved.epochs.keys() & over:
        entry = saved.epochs[epoch]
        detail = EpochDetail(
            list(entry.applied), closed_count=sum(bits.bit_count() for bits in entry.closed.values())
        )
        detail.duplicates = entry.duplicates
        old[epoch] = _counts_of(epoch, detail)
    kept = {epoch: entry for epoch, entry in saved.epochs.items() if epoch not in over}
    return SavedLedger(kept, tuple(old[epoch] for epoch in sorted(old)), saved.slots)
