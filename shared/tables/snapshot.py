"""The rows of a table at one version, while the table goes on.

A row that no later step has touched still has a stamp of that version or before: it is read where it is. One that a step is about to
change is kept first, once, as long as its slot is not written: so what is kept is bounded by the rows that steps touch meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np

from shared.tables.kernels import parts
from shared.tables.memory import Numbers
from shared.tables.table import RowsOfIds, Table, by_slot, joined, stamps_of

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


class TableSnapshot:
    """Of the table's newest version. `lock`: held while the table is stepped. `close` it at the end. `updates`, `sketch`: see Table."""

    def __init__(self, table: Table, lock: Lock) -> None:
        self.spec, self.version, self.updates = table.spec, table.version, table.updates
        self.width = table.width
        self.sketch = None if table.sketch is None else table.sketch.copy()
        self._table, self._lock = table, lock
        self._counts = table.counts_by_slot()
        self._next = 0  # slots before it are read
        self._kept: dict[int, list[RowsOfIds]] = {}
        table.leaving.append(self._keep)

    def __repr__(self) -> str:
        return f"<TableSnapshot {self.spec.name} version {self.version}: {self.rows} rows>"

    @property
    def rows(self) -> int:
        return int(self._counts.sum())

    @property
    def kept_bytes(self) -> int:
        return sum(rows.content.nbytes for kept in self._kept.values() for rows in kept)

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
        """The rows of the slots, slot after slot, in each by ids. Groups are read in order, each once; any thread may."""
        found = []
        for slot in range(group.first, group.last):
            if not self._counts[slot]:
                continue
            with self._lock:
                now = self._table.read_slot(slot)
                rows = joined([now.where(stamps_of(now.words) <= self.version), *self._kept.pop(slot, ())], self.width)
                self._next = slot + 1
            assert len(rows) == self._counts[slot], (slot, len(rows), self._counts[slot])
            found.append(rows)
        return RowsOfIds(
            *(np.concatenate(each) for each in zip(*((r.ids, r.words, r.content) for r in found), strict=True))
        )

    def close(self) -> None:
        """Nothing is kept any more."""
        if self._keep in self._table.leaving:
            self._table.leaving.remove(self._keep)
        self._kept = {}

    def _keep(self, before: RowsOfIds) -> None:
        """Rows as they were before a step; called with the lock."""
        chosen = (before.words != parts.EMPTY) & (stamps_of(before.words) <= self.version)
        if not chosen.any():
            return
        for slot, rows in by_slot(before.where(chosen), self.spec.seed, len(self._counts)):
            if slot >= self._next:
                self._kept.setdefault(slot, []).append(rows)


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
