"""Rows as they were before steps changed them, until whoever reads a snapshot has their slot.

step --add--> loose --> pieces: of one step and some slots, in the order of slots --take--> read         one thread adds, another one does the rest
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from threading import Lock

import numpy as np

from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.memory import Floats, Numbers, Words
from trireme_shared.tables.table import Flags, RowsOfIds, one_after_the_other, stamps_of

TOGETHER = 32  # slots: few pieces, however many steps


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Slot after slot: `ids` (int64), `words` (uint64), and `places` (int64), where each has its row in `content` (float32 (n, width)), which is in no order: rows are
    large. `ends`: int64 (k,), where those of each slot end."""

    ids: Numbers
    words: Words
    places: Numbers
    content: Floats
    ends: Numbers


@dataclass(frozen=True, slots=True)
class _Piece:
    """`slots`: uint16 or int64, of each row; they ascend."""

    slots: Numbers
    rows: RowsOfIds

    def between(self, first: int, last: int) -> tuple[int, int]:
        """Where the rows of slots [first, last) begin and end."""
        begin, end = np.searchsorted(self.slots, (first, last)).tolist()
        return begin, end

    def cut(self, begin: int, end: int) -> _Piece:
        """Shares its memory."""
        rows, own = self.rows, slice(begin, end)
        return _Piece(self.slots[own], RowsOfIds(rows.ids[own], rows.words[own], rows.content[own]))

    def where(self, chosen: Flags) -> _Piece:
        return _Piece(self.slots[chosen], self.rows.where(chosen))


class Overwritten:
    """Rows that a step has changed or removed since `version`, of versions after `after`. `bytes`: what they take."""

    def __init__(self, version: int, seed: int, slot_count: int, width: int) -> None:
        self._version, self._after, self._seed, self._slot_count, self._width = version, -1, seed, slot_count, width
        self._lock = Lock()  # of what is loose
        self._next = 0  # slots before it are read
        self._loose: list[RowsOfIds] = []
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)  # by TOGETHER slots
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
        for pieces in self._pieces.values():
            pieces[:] = [piece.where(self._count(piece.rows.words)) for piece in pieces]
        self._kept_bytes = sum(piece.rows.bytes for pieces in self._pieces.values() for piece in pieces)

    def of(self, slot: int) -> RowsOfIds:
        """Those of a slot until now, each once, by their ids; they are kept."""
        self._sort()
        pieces = self._pieces.get(slot // TOGETHER, [])
        found = [piece.cut(*piece.between(slot, slot + 1)).rows for piece in pieces]
        rows = one_after_the_other(found, self._width)
        return rows.where(np.unique(rows.ids, return_index=True)[1])

    def take(self, slots: Numbers) -> KeptRows:
        """Those of slots that ascend, in each in the order in which they were changed; they are forgotten here, as those of slots before. An id may be there twice
        if its slot left for another process, and came back: the first one counts."""
        self._sort()
        first, last = int(slots[0]), int(slots[-1]) + 1
        found: list[_Piece] = []
        for part in range(first // TOGETHER, (last - 1) // TOGETHER + 1):
            left = []
            for piece in self._pieces.pop(part, ()):
                begin, end = piece.between(first, last)
                found.append(piece.cut(begin, end))
                left.append(piece.cut(end, len(piece.slots)))
                self._kept_bytes -= piece.rows.bytes - left[-1].rows.bytes
            if left := [piece for piece in left if len(piece.slots)]:
                self._pieces[part] = left
        whole = one_after_the_other([piece.rows for piece in found], self._width)
        numbers = np.concatenate([np.empty(0, np.int64), *(piece.slots for piece in found)]).astype(np.int64) - first
        counts = np.bincount(numbers, minlength=last - first)[slots - first]
        wanted = np.zeros(last - first, np.bool_)
        wanted[slots - first] = True  # another slot may have got rows since
        places = np.argsort(numbers, kind="stable")
        places = places[wanted[numbers[places]]]
        return KeptRows(whole.ids[places], whole.words[places], places, whole.content, np.cumsum(counts))

    def read_until(self, slot: int) -> None:
        """Nothing is asked for of slots before it any more."""
        for part in range(self._next // TOGETHER, slot // TOGETHER):
            self._kept_bytes -= sum(piece.rows.bytes for piece in self._pieces.pop(part, ()))
        self._next = slot

    def clear(self) -> None:
        with self._lock:
            self._loose = []
            self._pieces = defaultdict(list)
            self._loose_bytes = self._kept_bytes = 0

    def _sort(self) -> None:
        """What is loose, into pieces."""
        with self._lock:
            loose, self._loose = self._loose, []
            self._kept_bytes, self._loose_bytes = self._kept_bytes + self._loose_bytes, 0
        for before in loose:
            self._kept_bytes -= before.bytes
            chosen = np.flatnonzero(self._count(before.words))
            slots = slots_of(before.ids[chosen], self._seed, self._slot_count)
            if self._slot_count <= 1 << 16:
                slots = slots.astype(np.uint16)  # sorted faster
            order = np.argsort(slots, kind="stable")
            order = order[np.searchsorted(slots, self._next, sorter=order) :]
            chosen, slots = chosen[order], slots[order]
            for part, begin, end in _runs(slots // TOGETHER):
                piece = _Piece(slots[begin:end], before.where(chosen[begin:end]))
                self._pieces[part].append(piece)
                self._kept_bytes += piece.rows.bytes


def _runs(numbers: Numbers) -> list[tuple[int, int, int]]:
    """Of numbers that ascend: each one, and where it begins and ends."""
    found, begins = np.unique(numbers, return_index=True)
    ends = np.append(begins, len(numbers))[1:]
    return list(zip(found.tolist(), begins.tolist(), ends.tolist(), strict=True))
