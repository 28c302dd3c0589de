"""Asynchronous books: per block and open task the next minibatch expected, so that each is applied exactly once.

    open(next per block) --every block has every minibatch--> closed (one bit per task) --epoch is old--> counts only

A push [start, end): start < next is a duplicate, start > next came too early, else it is due.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pserver_service.core.blocks import Verdict
from shared.messages import EpochLedger, LedgerAnswer, PushHeader

EPOCHS_IN_DETAIL = 2
_CHUNK = 1024  # bits per entry of a sparse bitmap


@dataclass(slots=True)
class OpenTask:
    """`next[i]`: minibatch that block i (of this pserver, in order) expects; `unfinished`: blocks that miss some."""

    minibatches: int
    next: list[int]
    unfinished: int
    attempt: int = 0


@dataclass(slots=True)
class EpochBooks:
    """`applied[i]`: minibatches applied to block i in this epoch."""

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
    """Of all blocks of one pserver; blocks are named by their position 0 … blocks - 1 among them."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._epochs: dict[int, EpochBooks] = {}
        self._old: dict[int, EpochLedger] = {}

    def __repr__(self) -> str:
        return f"<Ledger of {self._blocks} blocks: {[book.model_dump() for book in self.books()]}>"

    def judge(self, push: PushHeader, task: int, block: int) -> Verdict:
        """Whether this push is due at this block; changes nothing but counts, attempts and the set of open tasks."""
        books = self._books(push.epoch)
        if books is None:
            self._old[push.epoch] = _one_more_duplicate(self._old.get(push.epoch, _nothing(push.epoch)))
            return Verdict.DUPLICATE
        if books.is_closed(task):
            books.duplicates += 1
            return Verdict.DUPLICATE
        entry = books.open.get(task)
        if entry is None:
            entry = books.open[task] = OpenTask(push.minibatches, [0] * self._blocks, self._blocks)
        if push.minibatches != entry.minibatches:
            return Verdict.BAD_FRAME
        if push.attempt < entry.attempt:
            return Verdict.STALE_ATTEMPT
        entry.attempt = push.attempt
        if push.start < entry.next[block]:
            books.duplicates += 1
            return Verdict.DUPLICATE
        return Verdict.TOO_EARLY if push.start > entry.next[block] else Verdict.APPLIED

    def enter(self, push: PushHeader, task: int, block: int) -> None:
        """The push was due and is applied."""
        books = self._epochs[push.epoch]
        entry = books.open[task]
        entry.next[block] = push.end
        books.applied[block] += push.end - push.start
        if push.end == entry.minibatches:
            entry.unfinished -= 1
            if entry.unfinished == 0:
                books.close(task)

    def next_of(self, epoch: int, task: int) -> LedgerAnswer:
        """The lowest minibatch that some block still expects; a pserver without blocks expects none."""
        books = self._epochs.get(epoch)
        if books is None:
            over = bool(self._epochs) and epoch < min(self._epochs)
            return LedgerAnswer(closed=over or self._blocks == 0)
        if books.is_closed(task):
            return LedgerAnswer(closed=True)
        entry = books.open.get(task)
        return LedgerAnswer(next=min(entry.next) if entry else 0)

    def books(self) -> tuple[EpochLedger, ...]:
        """All epochs, oldest first."""
        detailed = [_counts(epoch, books) for epoch, books in self._epochs.items()]
        return tuple(sorted([*self._old.values(), *detailed], key=lambda entry: entry.epoch))

    def _books(self, epoch: int) -> EpochBooks | None:
        """The epoch's books, opened if it is new; None if only counts are left: the master starts an epoch only when
        every task of the epochs before is closed or discarded, so whatever comes for those is late."""
        books = self._epochs.get(epoch)
        if books is not None or epoch in self._old or (self._epochs and epoch < min(self._epochs)):
            return books
        books = self._epochs[epoch] = EpochBooks([0] * self._blocks)
        while len(self._epochs) > EPOCHS_IN_DETAIL:
            oldest = min(self._epochs)
            self._old[oldest] = _counts(oldest, self._epochs.pop(oldest))
        return self._epochs.get(epoch)


def _counts(epoch: int, books: EpochBooks) -> EpochLedger:
    return EpochLedger(
        epoch=epoch,
        applied_lowest=min(books.applied, default=0),
        applied_highest=max(books.applied, default=0),
        tasks_closed=books.closed_count,
        tasks_open=len(books.open),
        duplicates=books.duplicates,
    )


def _nothing(epoch: int) -> EpochLedger:
    return EpochLedger(epoch=epoch, applied_lowest=0, applied_highest=0, tasks_closed=0, tasks_open=0, duplicates=0)


def _one_more_duplicate(counts: EpochLedger) -> EpochLedger:
    return counts.model_copy(update={"duplicates": counts.duplicates + 1})
