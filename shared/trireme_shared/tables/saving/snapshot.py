"""The rows of a table at one version, while the table goes on: all, or those that have changed since an older version.

A row that no later step has touched still has a stamp of that version or before: it is read where it is. One that a step is about to
change is kept first, once, as long as its slot is not written: so what is kept is bounded by the rows that steps touch meanwhile.

    some slots: their cells and what was kept, by ids --> rows, as records --> what was kept meanwhile, instead --> written

The lock, which steps hold, is taken once for a group of slots: then what was kept is complete, and the cells of the next group are copied. Rows are read
without it: if a step changes one meanwhile it is kept, and that is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.tables.kernels import parts
from trireme_shared.tables.kernels import saving as loops
from trireme_shared.tables.memory import CellsOfSlots, Numbers, Words, with_places
from trireme_shared.tables.saving.overwritten import KeptRows, Overwritten
from trireme_shared.tables.table import Flags, RowsOfIds, Table, stamps_of

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
    """Since version `since`. `counts`: int64 (slots,), rows that steps have changed. int64 (n,): `removed`, ids whose rows left (they may
    have come back), and `expired`, ids whose rows are still there, but count no more. `bytes`: in a part."""

    since: int
    counts: Numbers
    removed: Numbers
    expired: Numbers
    bytes: int


class TableSnapshot:
    """Of the table's newest version. `lock`: held while the table is stepped. `close` it at the end. `updates`, `sketch`: see Table.
    `changes`: it has these alone (`narrow`); None: it is whole. `slots`: it has the rows of these alone; None: of all."""

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
        """Any thread may ask, before anything is read. It takes about 50 ms a million rows. None: it is not known which rows have left."""
        removed = self._removed.since(since)
        if removed is None:
            return None
        ttl, counts, expired = self.spec.evict_after_steps, np.zeros_like(self._counts), []
        for slot in np.flatnonzero(self._counts).tolist():
            with self._lock:
                ids, words = self._cells.of_slot(slot)
            kept = self._kept.of(slot)
            if len(kept) == self._counts[slot]:
                ids, words = ids[:0], words[:0]  # see `merge`
            kept = kept.where(~np.isin(kept.ids, ids[stamps_of(words) <= self.version]))
            stamps = stamps_of(words)
            ids, stamps = ids[stamps <= self.version], stamps[stamps <= self.version]
            ids, stamps = (np.concatenate(each) for each in ([ids, kept.ids], [stamps, stamps_of(kept.words)]))
            counts[slot] = np.count_nonzero(stamps > since)
            if ttl is not None:
                expired.append(ids[(stamps <= since) & (self.version - stamps > ttl) & (since - stamps <= ttl)])
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
        """int64 (n, 1 + words): slots whose counts of ids without a row have changed, and these counts; of a whole one all that have some."""
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
        """The rows of the slots as they are stored (see to_records), slot after slot, in each by ids: int64 (n, words), in `into`, which has as many bytes, or, without
        it, good until the next group is asked for. And whether all their values are finite. Groups are read in order, each once; any thread may. Raises InvalidArgument: it was given up, or closed."""
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
        """Ids, marks and places of the rows of some slots; see `merge`. Changes the order of `cells` and of the ids in `kept`."""
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
            raise InvalidArgument(f"the snapshot of version {self.version} of table {self.spec.name} was closed")

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
    """`later`: by so many versions than they were stamped."""
    content = np.ascontiguousarray(records.view(np.float32)[:, 4 : 4 + width])
    words = records[:, 1].copy().view(np.uint64) + (np.uint64(later) << parts.STAMP_SHIFT)
    return RowsOfIds(np.ascontiguousarray(records[:, 0]), words, content)
