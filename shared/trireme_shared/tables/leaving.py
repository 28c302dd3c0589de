"""Which rows leave: expired ones, slot after slot; and of a slot that is full those that were changed longest
ago, of one step those with the least ids.

    all rows of a slot --now and then--> queue of its oldest --one after the other--> gone

A row of the queue that was changed since stays: its stamp is another. All others are newer than those in the
queue, so which rows leave does not depend on when queues were made. RemovedIds tells for a while which ids
have left, so that a delta can name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.records.layout import AGED_STEPS, OLDEST
from trireme_shared.tables.kernels import cells as cell_loops
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.memory import Cells, Numbers, Words, ages_of
from trireme_shared.tables.needs import QUEUE_SHARE, SKETCH_CELLS

LEAST = 16  # places of a queue
AT_ONCE = 4096  # rows that leave between two values
# minibatches less than `admit_after` for each cell: below 2 % of rare ids then get a row too early
MOST_COUNTED = 0.5
SWEEPS = 128  # of a slot in `evict_after_steps` steps, if it has so many rows for so long

Stamps = np.int32
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Counts:
    """`refused`: gradients of ids that were not admitted yet."""

    admitted: int = 0
    evicted: int = 0
    refused: int = 0


class Oldest:
    """`quotas`: rows that each slot may have, int64 (slots,)."""

    def __init__(self, quotas: Numbers) -> None:
        self.quotas = quotas
        places = max(LEAST, -(-int(quotas.max()) // QUEUE_SHARE))
        self._ids = np.empty((len(quotas), places), np.int64)
        self._stamps = np.empty((len(quotas), places), Stamps)
        self._heads, self._lengths = np.zeros(len(quotas), np.int64), np.zeros(len(quotas), np.int64)

    @property
    def bytes(self) -> int:
        return self._ids.nbytes + self._stamps.nbytes

    def leave(self, cells: Cells, surplus: Numbers, version: int) -> Iterator[tuple[Numbers, Words]]:
        """Removes `surplus[slot]` cells of each slot (int64 (slots,); not above 0: none), none of them
        changed in `version`, of which there are enough. Yields ids and words of some of them, perhaps of
        none, after some milliseconds of work."""
        slots = np.flatnonzero(surplus > 0)
        needed, place = surplus[slots], 0
        ids, words = np.empty(AT_ONCE, np.int64), np.empty(AT_ONCE, np.uint64)
        while place < len(slots):
            place, found = cell_loops.leave(
                cells.addresses,
                cells.capacities,
                cells.used,
                cells.seed,
                cells.secret,
                slots,
                place,
                needed,
                self._ids,
                self._stamps,
                self._heads,
                self._lengths,
                ids,
                words,
            )
            if place < len(slots) and found < AT_ONCE:
                self._fill(cells, int(slots[place]), version)
            yield ids[:found].copy(), words[:found].copy()

    def forget(self, slots: int | Flags | Numbers) -> None:
        """Other rows are there now."""
        self._heads[slots] = self._lengths[slots] = 0

    def _fill(self, cells: Cells, slot: int, version: int) -> None:
        ids, words = cells.of_slot(slot)
        stamps = (words >> parts.STAMP_SHIFT).astype(Stamps)
        times = -ages_of(words, version).astype(Stamps)
        idle = times < 0
        ids, stamps, times = ids[idle], stamps[idle], times[idle]
        assert len(ids), f"slot {slot} has no row that version {version} leaves as it is"
        # full slots do not all look for their oldest in the same step
        most = max(LEAST, self._ids.shape[1] // 2 + (slot * 40503 + version) % (self._ids.shape[1] // 2 + 1))
        chosen = _least(times, ids, most)
        count = len(chosen)
        self._ids[slot, :count], self._stamps[slot, :count] = ids[chosen], stamps[chosen]
        self._heads[slot], self._lengths[slot] = 0, count


def shared_out(rows: int, slots: int) -> Numbers:
    """Of each slot, together `rows`: int64 (slots,)."""
    return rows // slots + (np.arange(slots) < rows % slots)


def without_room(slots: Numbers, room: Numbers) -> Flags:
    """Of ids of `slots` (int64 (n,)), which come after the first `room[slot]` of theirs: bool (n,)."""
    order = np.argsort(slots, kind="stable")
    found = slots[order]
    rank = np.arange(len(slots)) - np.searchsorted(found, found)
    without = np.zeros(len(slots), np.bool_)
    without[order] = rank >= room[found]
    return without


def forget_counts(sketch: npt.NDArray[np.uint8], needed: int) -> Flags:
    """Halves all counts of each slot that has counted so much that many counts would be too high; answers of
    which slots: bool (slots,). In place. (Einziger, Friedman, Manes 2017: TinyLFU's reset.)"""
    counted = sketch[:, :SKETCH_CELLS].sum(axis=1, dtype=np.int64)
    full: Flags = counted > MOST_COUNTED * SKETCH_CELLS * (needed - 1)
    sketch[full] >>= 1
    return full


def swept(version: int, ttl: int, slots: int) -> range:
    """The slots that give back expired rows in the step that makes `version`: each comes up SWEEPS times in
    `ttl` steps, if there are so many of both."""
    round_steps = min(max(1, ttl // SWEEPS), slots)
    turn = version % round_steps
    return range(turn * slots // round_steps, (turn + 1) * slots // round_steps)


def aged(version: int, slots: int) -> range:
    """The slots whose rows are kept from getting older than OLDEST in the step that makes `version`: each
    comes up once in AGED_STEPS steps. Before OLDEST steps there are no such rows."""
    turn, between = divmod(version, max(1, AGED_STEPS // slots))
    slot = turn % slots
    return range(slot, slot + 1) if version > OLDEST and not between else range(0)


def _least(times: np.ndarray, ids: Numbers, count: int) -> Numbers:
    """Which are the first `count` by time, then id, in this order."""
    if len(ids) > count:
        last = np.partition(times, count - 1)[count - 1]
        below, same = np.flatnonzero(times < last), np.flatnonzero(times == last)
        same = same[np.argpartition(ids[same], count - len(below) - 1)[: count - len(below)]]
        chosen = np.concatenate([below, same])
    else:
        chosen = np.arange(len(ids))
    return chosen[np.lexsort((ids[chosen], times[chosen]))]


LEAST_KEPT = 1 << 16  # ids, whatever the size of the table


class RemovedIds:
    """Which ids have left a table lately; bounded: then it is not known. The table begins at `version`."""

    def __init__(self, version: int) -> None:
        self._floor = version
        self._log: list[tuple[int, Numbers]] = []
        self.count = 0

    def __repr__(self) -> str:
        return f"<RemovedIds: {self.count} since version {self._floor}>"

    def add(self, version: int, ids: Numbers, rows: int) -> None:
        """They left in the step to `version`. `rows`: of the table. More than a quarter of it are not kept: a
        delta would be no smaller."""
        self._log.append((version, ids))
        self.count += len(ids)
        if self.count > max(LEAST_KEPT, rows // 4):
            self.lose(version)

    def lose(self, version: int) -> None:
        """Rows came or went otherwise by `version`: what has changed since then or before is not known."""
        self._floor, self._log, self.count = version + 1, [], 0

    def since(self, version: int) -> Numbers | None:
        """int64 (n,), ascending: those that have left since `version`; some may have come back. None: not
        known."""
        if version < self._floor:
            return None
        found = [ids for left, ids in self._log if left >= version]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def forget(self, version: int) -> None:
        """Nobody will ask for versions before it."""
        self._floor = max(self._floor, version)
        self._log = [entry for entry in self._log if entry[0] >= version]
        self.count = sum(len(ids) for _, ids in self._log)

    def copy(self) -> RemovedIds:
        found = RemovedIds(self._floor)
        found._log, found.count = list(self._log), self.count
        return found
