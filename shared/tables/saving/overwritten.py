"""Rows as they were before steps changed them, until whoever reads a snapshot has their slot.

step --add--> loose --> by some slots --> by slots --take--> read         one thread adds, another one does the rest
"""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

import numpy as np

from shared.tables.kernels import parts
from shared.tables.memory import Numbers, Words
from shared.tables.table import Flags, RowsOfIds, by_slot, chosen_by_slot, one_after_the_other, stamps_of

TOGETHER = 32  # slots: few pieces, however many steps


class Overwritten:
    """Rows that a step has changed or removed since `version`, of versions after `after`. `bytes`: what they take."""

    def __init__(self, version: int, seed: int, slot_count: int, width: int) -> None:
        self._version, self._after, self._seed, self._slot_count, self._width = version, -1, seed, slot_count, width
        self._lock = Lock()  # of what is loose
        self._next = 0  # slots before it are read
        self._loose: list[RowsOfIds] = []
        self._kept: defaultdict[int, list[RowsOfIds]] = defaultdict(list)  # by TOGETHER slots
        self._ready: defaultdict[int, list[RowsOfIds]] = defaultdict(list)
        self._loose_bytes = self._kept_bytes = 0

    def __repr__(self) -> str:
        return f"<Overwritten since version {self._version}: {self.bytes} bytes>"

    @property
    def bytes(self) -> int:
        return self._loose_bytes + self._kept_bytes

    @property
    def slots_read(self) -> int:
        """So many from the first on."""
        return self._next

    def add(self, before: RowsOfIds) -> None:
        """Rows as they were before a step. They are not copied if most of them count."""
        counts = self._count(before.words)
        many = np.count_nonzero(counts)
        if not many:
            return
        if 2 * many > len(before):  # ids may be a part of a whole push
            rows = RowsOfIds(before.ids.copy(), before.words, before.content)
        else:
            rows = before.where(np.flatnonzero(counts))
        with self._lock:
            self._loose.append(rows)
            self._loose_bytes += rows.bytes

    def _count(self, words: Words) -> Flags:
        stamps = stamps_of(words)
        found: Flags = (words != parts.EMPTY) & (stamps <= self._version) & (stamps > self._after)
        return found

    def narrow(self, after: int) -> None:
        """Only rows of versions after that count from now on. Nothing has been taken yet, and nothing is added meanwhile."""
        self._after = after
        self._sort()
        for found in (self._kept, self._ready):
            for pieces in found.values():
                pieces[:] = [rows.where(self._count(rows.words)) for rows in pieces]
        self._kept_bytes = sum(
            rows.bytes for found in (self._kept, self._ready) for pieces in found.values() for rows in pieces
        )

    def of(self, slot: int) -> RowsOfIds:
        """Those of a slot until now, each once, by their ids; they are kept."""
        self._sort()
        self._spread(slot, slot)
        rows = one_after_the_other(self._ready[slot], self._width)
        return rows.where(np.unique(rows.ids, return_index=True)[1])

    def take(self, slots: Numbers) -> tuple[RowsOfIds, Numbers]:
        """Those of slots that ascend, slot after slot, in each in the order in which they were changed; they are forgotten here. An id may be there twice if its slot
        left for another process, and came back: the first one counts. int64 (k,): where those of each slot end."""
        self._sort()
        self._spread(int(slots[0]), int(slots[-1]))
        found = [self._joined(self._ready, slot) for slot in slots.tolist()]
        ends = np.cumsum([len(rows) for rows in found])
        whole = one_after_the_other([rows for rows in found if len(rows)], self._width)
        self._kept_bytes -= whole.bytes
        return whole, ends

    def read_until(self, slot: int) -> None:
        """Nothing is asked for of slots before it any more."""
        self._next = slot

    def clear(self) -> None:
        with self._lock:
            self._loose = []
            self._kept, self._ready = defaultdict(list), defaultdict(list)
            self._loose_bytes = self._kept_bytes = 0

    def _sort(self) -> None:
        """What is loose, by TOGETHER slots."""
        with self._lock:
            loose, self._loose = self._loose, []
            self._kept_bytes, self._loose_bytes = self._kept_bytes + self._loose_bytes, 0
        for before in loose:
            self._kept_bytes -= before.bytes
            chosen = np.flatnonzero(self._count(before.words))
            for part, some in chosen_by_slot(before.ids[chosen], self._seed, self._slot_count, TOGETHER):
                if part >= self._next // TOGETHER:
                    self._kept[part].append(before.where(chosen[some]))
                    self._kept_bytes += self._kept[part][-1].bytes

    def _spread(self, first: int, last: int) -> None:
        """What is kept of slots [first, last], and of those together with them, by slots."""
        for part in range(first // TOGETHER, last // TOGETHER + 1):
            for number, rows in by_slot(self._joined(self._kept, part), self._seed, self._slot_count):
                if number >= self._next:
                    self._ready[number].append(rows)
                else:
                    self._kept_bytes -= rows.bytes

    def _joined(self, found: dict[int, list[RowsOfIds]], number: int) -> RowsOfIds:
        return one_after_the_other(found.pop(number, []), self._width)
