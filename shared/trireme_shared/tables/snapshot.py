"""The rows of a table at one version, while the table goes on: all, or those that have changed since an older
version.

A row that no later step has touched still has a stamp of that version or before: it is read where it is. One
that a step is about to change is kept first, once, as long as its slot is not written: so what is kept is
bounded by the rows that steps touch meanwhile.

    some slots: their cells and what was kept, by ids --> rows, as records
        --> what was kept meanwhile, instead --> written

The lock, which steps hold, is taken once for a group of slots: then what was kept is complete, and the cells
of the next group are copied. Rows are read without it: if a step changes one meanwhile it is kept, and that
is what counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import LATER_STAMPS, OLDEST
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.kernels import saving as loops
from trireme_shared.tables.memory import (
    CellsOfSlots,
    Floats,
    Numbers,
    Words,
    ages_of,
    stamps_of,
    with_places,
)
from trireme_shared.tables.table import Flags, RowsOfIds, Table, one_after_the_other

TOGETHER = 32  # slots: few pieces, however many steps


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Slot after slot: `ids` (int64), `words` (uint64), and `places` (int64), where each has its row in
    `content` (float32 (n, width)), which is in no order: rows are large. `ends`: int64 (k,), where those of
    each slot end."""

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
    """Rows as they were before steps changed or removed them, until whoever reads a snapshot has their slot:
    rows changed since `version`, of versions after `after`. `bytes`: what they take.

    step --add--> loose --> pieces: of one step and some slots, in the order of slots --take--> read
    one thread adds, another one does the rest
    """

    def __init__(self, version: int, seed: int, slot_count: int, width: int) -> None:
        self._version, self._after, self._seed, self._slot_count, self._width = (
            version,
            -1,
            seed,
            slot_count,
            width,
        )
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
        ages = ages_of(words, self._version)
        found: Flags = (words != parts.EMPTY) & (ages >= 0) & (ages < self._version - self._after)
        return found

    def narrow(self, after: int) -> None:
        """Only rows of versions after that count from now on. Nothing has been taken yet, and nothing is
        added meanwhile."""
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
        """Those of slots that ascend, in each in the order in which they were changed; they are forgotten
        here, as those of slots before. An id may be there twice if its slot left for another process, and
        came back: the first one counts."""
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
        numbers = (
            np.concatenate([np.empty(0, np.int64), *(piece.slots for piece in found)]).astype(np.int64)
            - first
        )
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


GROUP_BYTES = 12 << 20  # of records that are made at a time: a file lends so much memory


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots [first, last) with `rows` rows together."""

    first: int
    last: int
    rows: int


def new_lock() -> Lock:
    """For the tables that step together."""
    return Lock()


@dataclass(frozen=True, slots=True)
class Changes:
    """Since version `since`. `counts`: int64 (slots,), rows that steps have changed. int64 (n,): `removed`,
    ids whose rows left (they may have come back), and `expired`, ids whose rows are still there, but count no
    more. `bytes`: in a part."""

    since: int
    counts: Numbers
    removed: Numbers
    expired: Numbers
    bytes: int


class TableSnapshot:
    """Of the table's newest version. `lock`: held while the table is stepped. `close` it at the end.
    `updates`, `sketch`: see Table. `changes`: it has these alone (`narrow`); None: it is whole. `slots`: it
    has the rows of these alone; None: of all."""

    def __init__(self, table: Table, lock: Lock, slots: Flags | None = None) -> None:
        self.spec, self.version, self.updates = table.spec, table.version, table.updates
        self.width = table.width
        self.sketch = None if table.sketch is None else table.sketch.copy()
        self._sketch_stamps = table.sketch_stamps.copy()
        self.changes: Changes | None = None
        self._after = -1
        self._removed = table.removed.copy()
        self._table, self._lock = table, lock
        self._cells, self._rows = table.memory
        self._counts = table.counts_by_slot()
        if slots is not None:
            self._counts[~slots] = 0
            self._sketch_stamps[~slots] = 0
        self._kept = Overwritten(table.version, table.spec.seed, len(self._counts), table.width)
        self._ahead: CellsOfSlots | None = None  # of the group that is next
        self._buffer = np.empty(0, np.int64)
        self._problem: InvalidArgument | None = None
        table.leaving.append(self._kept.add)

    def __repr__(self) -> str:
        return f"<TableSnapshot {self.spec.name} version {self.version}: {self.rows} rows>"

    @property
    def rows(self) -> int:
        return int(self._counts.sum())

    @property
    def is_open(self) -> bool:
        """Whether steps keep rows for it."""
        return self._kept.add in self._table.leaving

    @property
    def slots_read(self) -> int:
        """So many from the first on."""
        return self._kept.slots_read

    @property
    def kept_bytes(self) -> int:
        return self._kept.bytes

    def changes_since(self, since: int) -> Changes | None:
        """Any thread may ask, before anything is read. It takes about 50 ms a million rows. None: it is not
        known which rows have left."""
        removed = self._removed.since(since)
        if removed is None or self.version - since > OLDEST - LATER_STAMPS:  # stamps do not tell
            return None
        ttl, counts, expired = self.spec.evict_after_steps, np.zeros_like(self._counts), []
        for slot in np.flatnonzero(self._counts).tolist():
            with self._lock:
                ids, words = self._cells.of_slot(slot)
            kept = self._kept.of(slot)
            if len(kept) == self._counts[slot]:
                ids, words = ids[:0], words[:0]  # see `merge`
            stamps = stamps_of(words, self.version)
            ids, stamps = ids[stamps <= self.version], stamps[stamps <= self.version]
            kept = kept.where(~np.isin(kept.ids, ids))
            kept_stamps = stamps_of(kept.words, self.version)
            ids, stamps = (np.concatenate(each) for each in ([ids, kept.ids], [stamps, kept_stamps]))
            counts[slot] = np.count_nonzero(stamps > since)
            if ttl is not None:
                expired.append(
                    ids[(stamps <= since) & (self.version - stamps > ttl) & (since - stamps <= ttl)]
                )
        gone = np.sort(np.concatenate(expired)) if expired else removed[:0]
        size = 8 * (int(counts.sum()) * record_words(self.width) + len(removed) + len(gone))
        if self.sketch is not None:
            size += int((self._sketch_stamps > since).sum()) * (8 + self.sketch.shape[1])
        return Changes(since, counts, removed, gone, size)

    def narrow(self, changes: Changes) -> None:
        """It has these alone from now on; before anything is read."""
        with self._lock:
            self.changes, self._after, self._counts = changes, changes.since, changes.counts
            self._kept.narrow(self._after)

    def sketch_rows(self) -> Numbers:
        """int64 (n, 1 + words): slots whose counts of ids without a row have changed, and these counts; of a
        whole one all that have some."""
        if self.sketch is None:
            return np.empty((0, 1), np.int64)
        slots = np.flatnonzero(self._sketch_stamps > max(self._after, 0))
        return np.concatenate([slots[:, None], self.sketch[slots].view(np.int64)], 1)

    def groups(self) -> Iterator[SlotGroup]:
        """All slots that have rows, in order, in groups of GROUP_BYTES or of one slot."""
        group = self._group_from(0)
        while group is not None:
            yield group
            group = self._group_from(group.last)

    def _group_from(self, first: int) -> SlotGroup | None:
        slots = first + np.flatnonzero(self._counts[first:])
        if not len(slots):
            return None
        sums = np.cumsum(self._counts[slots])
        many = max(1, int(np.searchsorted(sums, GROUP_BYTES // (8 * record_words(self.width)), side="right")))
        last = int(slots[many]) if many < len(slots) else len(self._counts)
        return SlotGroup(int(slots[0]), last, int(sums[many - 1]))

    def records(self, group: SlotGroup, into: memoryview | None = None) -> tuple[Numbers, bool]:
        """The rows of the slots as they are stored (see to_records), slot after slot, in each by ids: int64
        (n, words), in `into`, which has as many bytes, or, without it, good until the next group is asked
        for. And whether all their values are finite. Groups are read in order, each once; any thread may.
        Raises InvalidArgument: it was given up, or closed."""
        cells, self._ahead = self._ahead, None
        if cells is None or not np.array_equal(cells.slots, self._slots_of(group)):
            with self._lock:
                cells = self._collected(group)
        kept = self._kept.take(cells.slots)
        ids, marks, places = self._by_ids(cells, kept)
        records = self._memory_for(len(ids), into)
        finite = self._rows.to_records(ids, marks, places, kept.content, self.spec.dim, records)
        following = self._group_from(group.last)
        with self._lock:  # no step is under way, so all that has changed meanwhile is kept
            if following is not None:
                self._ahead = self._collected(following)
        late = self._kept.take(cells.slots)
        self._check()
        ends, floats = np.cumsum(self._counts[cells.slots]), records.view(np.float32)
        loops.put_right(ids, places, ends, late.ids, late.places, late.ends, late.content, floats)
        self._kept.read_until(group.last)
        # what a step has made meanwhile does not count, what was kept does
        if not (finite and np.isfinite(late.content[:, : self.spec.dim]).all()):
            finite = bool(np.isfinite(floats[:, 4 : 4 + self.spec.dim]).all())
        return records, finite

    def _by_ids(self, cells: CellsOfSlots, kept: KeptRows) -> tuple[Numbers, Words, Numbers]:
        """Ids, marks and places of the rows of some slots; see `merge`. Changes the order of `cells` and of
        the ids in `kept`."""
        numbers = with_places(kept.words, kept.places)
        loops.sort_slots(cells.ids, cells.words, cells.ends)
        loops.sort_slots(kept.ids, numbers, kept.ends)
        counts = self._counts[cells.slots]
        rows = int(counts.sum())
        ids, marks, places = np.empty(rows, np.int64), np.empty(rows, np.uint64), np.empty(rows, np.int64)
        given = cells.ids, cells.words, cells.ends, kept.ids, numbers, kept.ends
        right = loops.merge(*given, ids, marks, places, counts)
        self._check()
        assert right == len(counts), (self, cells.slots[right], counts[right])
        return ids, marks, places

    def _memory_for(self, rows: int, given: memoryview | None) -> Numbers:
        size = rows * record_words(self.width)
        if given is not None:
            return np.frombuffer(given, np.int64).reshape(rows, -1)
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.int64)
        return self._buffer[:size].reshape(rows, -1)

    def read(self, group: SlotGroup) -> RowsOfIds:
        """As `records`; copies."""
        return from_records(self.records(group)[0].copy(), self.width)

    def _collected(self, group: SlotGroup) -> CellsOfSlots:
        """With the lock."""
        return self._cells.collect(self._slots_of(group), self._after, self.version)

    def _slots_of(self, group: SlotGroup) -> Numbers:
        return group.first + np.flatnonzero(self._counts[group.first : group.last])

    def _check(self) -> None:
        """What was kept is complete."""
        if self._problem is not None:
            raise self._problem
        if not self.is_open:
            raise InvalidArgument(
                f"the snapshot of version {self.version} of table {self.spec.name} was closed"
            )

    def close(self) -> None:
        """Nothing is kept any more."""
        if self.is_open:
            self._table.leaving.remove(self._kept.add)
        self._kept.clear()

    def give_up(self, problem: InvalidArgument) -> None:
        """Nothing is kept any more, and who reads hears why."""
        self._problem = problem
        self.close()


def record_words(width: int) -> int:
    """int64 numbers of a row as it is stored: id, mark, content."""
    return 2 + (width + 1) // 2


def to_records(rows: RowsOfIds) -> Numbers:
    """int64 (n, record_words(width)): the id, the stamp and frequency, then the content's bytes."""
    width = rows.content.shape[1]
    records = np.zeros((len(rows), record_words(width)), np.int64)
    records[:, 0] = rows.ids
    records[:, 1] = (rows.words & ~parts.ROW_MASK).view(np.int64)
    records.view(np.float32)[:, 4 : 4 + width] = rows.content
    return records


def from_records(records: Numbers, width: int, later: int = 0) -> RowsOfIds:
    """Copies. `later`: by so many versions than they were stamped."""
    content = records.view(np.float32)[:, 4 : 4 + width].copy()
    words = records[:, 1].copy().view(np.uint64) + (np.uint64(later) << parts.STAMP_SHIFT)
    return RowsOfIds(records[:, 0].copy(), words, content)


class Chain:
    """Rows of one table in a chain of parts, a whole one and deltas: they are read newest first, and each id
    counts where it is seen first.

    newest delta --rows, gone--> next_older() --> delta before it ... --> the whole part
    """

    def __init__(self) -> None:
        self._newer = np.empty(0, np.int64)  # ascending
        self._here: list[Numbers] = []
        self._older = False

    @property
    def is_one(self) -> bool:
        """Whether no part was seen before this one."""
        return not self._older

    def rows(self, rows: RowsOfIds, *, last: bool = False) -> RowsOfIds:
        """Those of this part that no newer part tells of. `last`: no older one follows."""
        if not last:
            self._here.append(rows.ids)
        return rows.where(self._is_new(rows.ids)) if len(self._newer) else rows

    def gone(self, ids: Numbers) -> Numbers:
        """The same of ids without a row, or whose row has expired. After the part's rows: an id that is among
        them has come back."""
        self._here.append(ids)
        return ids[self._is_new(ids)]

    def next_older(self) -> None:
        """All of this part was seen."""
        self._newer, self._here = np.unique(np.concatenate([self._newer, *self._here])), []
        self._older = True

    def _is_new(self, ids: Numbers) -> Flags:
        if not len(self._newer):
            return np.ones(len(ids), np.bool_)
        places = np.searchsorted(self._newer, ids)
        places[places == len(self._newer)] = 0
        new: Flags = self._newer[places] != ids
        return new
