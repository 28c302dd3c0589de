"""The rows of a table at one version, while the table goes on: all, or those that have changed since an older version.

A row that no later step has touched still has a stamp of that version or before: it is read where it is. One that a step is about to
change is kept first, once, as long as its slot is not written: so what is kept is bounded by the rows that steps touch meanwhile.

    step --rows as they were--> loose --thread that reads--> kept, by some slots --> ready, by slots    a slot: its cells --> its rows --> those ready instead

The lock is held for copies of cells alone. Rows are read without it: if a step changes one meanwhile it is kept, and that is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np

from shared.errors import InvalidArgument
from shared.tables.kernels import parts
from shared.tables.memory import Numbers, Words
from shared.tables.table import RowsOfIds, Table, by_slot, joined, stamps_of

KEPT_SLOTS = 32
GROUP_BYTES = 16 << 20  # of rows that are read at a time


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
    `changes`: it has these alone (`narrow`); None: it is whole."""

    def __init__(self, table: Table, lock: Lock) -> None:
        self.spec, self.version, self.updates = table.spec, table.version, table.updates
        self.width = table.width
        self.sketch = None if table.sketch is None else table.sketch.copy()
        self._sketch_stamps = table.sketch_stamps.copy()
        self.changes: Changes | None = None
        self._after = -1
        self._removed = table.removed.copy()
        self._table, self._lock = table, lock
        self._counts = table.counts_by_slot()
        self._next = 0  # slots before it are read
        self._loose: list[RowsOfIds] = []
        self._kept: dict[int, list[RowsOfIds]] = {}  # by KEPT_SLOTS slots: few pieces, however many steps
        self._ready: dict[int, list[RowsOfIds]] = {}
        self._loose_bytes = self._kept_bytes = 0
        self._problem: InvalidArgument | None = None
        table.leaving.append(self._keep)

    def __repr__(self) -> str:
        return f"<TableSnapshot {self.spec.name} version {self.version}: {self.rows} rows>"

    @property
    def rows(self) -> int:
        return int(self._counts.sum())

    @property
    def is_open(self) -> bool:
        """Whether steps keep rows for it."""
        return self._keep in self._table.leaving

    @property
    def slots_read(self) -> int:
        """So many from the first on."""
        return self._next

    @property
    def kept_bytes(self) -> int:
        return self._loose_bytes + self._kept_bytes

    def changes_since(self, since: int) -> Changes | None:
        """Any thread may ask, before anything is read. It takes about 50 ms a million rows. None: it is not known which rows have left."""
        removed = self._removed.since(since)
        if removed is None:
            return None
        ttl, counts, expired = self.spec.evict_after_steps, np.zeros_like(self._counts), []
        for slot in np.flatnonzero(self._counts).tolist():
            ids, words = self._cells_of(slot)
            kept = self._kept_of(slot)
            if sum(map(len, kept)) == self._counts[slot]:
                ids, words = ids[:0], words[:0]  # see `read`
            here = ids[stamps_of(words) <= self.version]
            kept = [rows.where(~np.isin(rows.ids, here)) for rows in kept]
            stamps = stamps_of(words)
            ids, stamps = ids[stamps <= self.version], stamps[stamps <= self.version]
            ids, stamps = (
                np.concatenate(each)
                for each in ([ids, *(r.ids for r in kept)], [stamps, *(stamps_of(r.words) for r in kept)])
            )
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
            for pieces in (self._loose, *self._kept.values(), *self._ready.values()):
                pieces[:] = [rows.where(stamps_of(rows.words) > self._after) for rows in pieces]
            self._loose_bytes = sum(rows.bytes for rows in self._loose)
            self._kept_bytes = sum(
                rows.bytes for pieces in (*self._kept.values(), *self._ready.values()) for rows in pieces
            )

    def sketch_rows(self) -> Numbers:
        """int64 (n, 1 + words): slots whose counts of ids without a row have changed, and these counts; of a whole one all that have some."""
        if self.sketch is None:
            return np.empty((0, 1), np.int64)
        slots = np.flatnonzero(self._sketch_stamps > max(self._after, 0))
        return np.concatenate([slots[:, None], self.sketch[slots].view(np.int64)], 1)

    def groups(self) -> Iterator[SlotGroup]:
        """All slots that have rows, in order, in groups of GROUP_BYTES or of one slot."""
        most = max(1, GROUP_BYTES // (4 * self.width))
        first = rows = 0
        for slot, count in enumerate(self._counts.tolist()):
            if rows and rows + count > most:
                yield SlotGroup(first, slot, rows)
                first, rows = slot, 0
            rows += count
        if rows:
            yield SlotGroup(first, len(self._counts), rows)

    def read(self, group: SlotGroup) -> RowsOfIds:
        """The rows of the slots, slot after slot, in each by ids. Groups are read in order, each once; any thread may. Raises InvalidArgument: it was given up."""
        found = []
        for slot in range(group.first, group.last):
            if not self._counts[slot]:
                continue
            ids, words = self._cells_of(slot)
            stamps = stamps_of(words)
            chosen = (stamps <= self.version) & (stamps > self._after)
            rows = self._table.with_content(ids[chosen], words[chosen])
            kept = self._kept_of(slot)
            if self._problem is not None:
                raise self._problem
            if kept:
                whole = joined(kept, self.width)
                if len(whole) < self._counts[slot]:
                    whole = joined([rows.where(~np.isin(rows.ids, whole.ids)), whole], self.width)
                rows = whole  # a slot that left and came back may have other rows with stamps as old as these
            self._next = slot + 1
            self._kept_bytes -= sum(rows.bytes for rows in self._ready.pop(slot, ()))
            assert len(rows) == self._counts[slot], (slot, len(rows), self._counts[slot])
            found.append(rows)
        return RowsOfIds(
            *(np.concatenate(each) for each in zip(*((r.ids, r.words, r.content) for r in found), strict=True))
        )

    def _cells_of(self, slot: int) -> tuple[Numbers, Words]:
        with self._lock:
            return self._table.words_of_slot(slot)

    def _kept_of(self, slot: int) -> list[RowsOfIds]:
        """What steps until now have kept of a slot; none is under way. For the thread that reads."""
        with self._lock:
            loose, self._loose = self._loose, []
            self._kept_bytes, self._loose_bytes = self._kept_bytes + self._loose_bytes, 0
        seed, count = self.spec.seed, len(self._counts)
        for part, rows in by_slot(joined(loose, self.width), seed, count, KEPT_SLOTS):
            if part >= self._next // KEPT_SLOTS:  # what changes lies in slots that are looked at only, not read yet
                self._kept.setdefault(part, []).append(rows)
            else:
                self._kept_bytes -= rows.bytes
        for number, rows in by_slot(joined(self._kept.pop(slot // KEPT_SLOTS, []), self.width), seed, count):
            if number >= self._next:
                self._ready.setdefault(number, []).append(rows)
            else:
                self._kept_bytes -= rows.bytes
        found = self._ready.get(slot, [])
        whole = joined(found, self.width)
        ids, first = np.unique(whole.ids, return_index=True)
        if len(ids) < len(whole):  # of a slot that left for another process, and came back: what was kept first counts
            self._kept_bytes -= whole.bytes
            found = self._ready[slot] = [whole.where(first)]
            self._kept_bytes += found[0].bytes
        return found

    def close(self) -> None:
        """Nothing is kept any more."""
        if self.is_open:
            self._table.leaving.remove(self._keep)
        self._loose, self._kept, self._ready = [], {}, {}
        self._loose_bytes = self._kept_bytes = 0

    def give_up(self, problem: InvalidArgument) -> None:
        """Nothing is kept any more, and who reads hears why."""
        self._problem = problem
        self.close()

    def _keep(self, before: RowsOfIds) -> None:
        """Rows as they were before a step; called with the lock."""
        stamps = stamps_of(before.words)
        chosen = (before.words != parts.EMPTY) & (stamps <= self.version) & (stamps > self._after)
        if chosen.any():
            self._loose.append(before.where(chosen))
            self._loose_bytes += self._loose[-1].bytes


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
