"""Asynchronous: rows of embedding tables that move with their slots, while pushes step them one after the other.

source   LeavingOnArrival: all rows of the slots; which of them pushes change or remove meanwhile is remembered --> frozen, between two pushes --> those
         again, as they are now; the sketches
target   ArrivingOnArrival: rows apart in its tables --> whole: put right --the slot map says so--> `adopt`: as old here as they were there

There is no version before, and each parameter server counts versions for itself. What the slots have had by then is in the ledger
that moves along (core/asynchronous/ledger.py): a push that was refused meanwhile is due at the target, one that was taken is a duplicate there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from trireme_shared.protocol.wire.messages import MovedTable
from trireme_shared.serving.core.table.moving import ArrivingRows, LeavingRows, Parts, RowPart, portions
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.table import Flags, RowsOfIds

LEAST_NOTED = 1 << 16  # ids, from which on they are looked through for those that are there twice


class ChangedIds:
    """Ids of some slots (`flags`, bool (slots,)) whose rows pushes have changed or removed, or given them, since it was made. `close` it at the end."""

    def __init__(self, table: ShardedTable, flags: Flags) -> None:
        self._table, self._flags = table, flags
        self._noted: list[Numbers] = []
        self._count, self._limit = 0, LEAST_NOTED
        table.leaving.append(self._note)

    def __repr__(self) -> str:
        return f"<ChangedIds of {self._table.spec.name}: {self._count}>"

    def _note(self, before: RowsOfIds) -> None:
        ids = before.ids[self._table.are_in(self._flags, before.ids)]
        if len(ids):
            self._noted.append(ids)
            self._count += len(ids)
        if self._count > self._limit:
            self._limit = max(LEAST_NOTED, 2 * len(self.ids()))

    def ids(self) -> Numbers:
        """int64 (n,), ascending, each once."""
        self._noted = [np.unique(np.concatenate([np.empty(0, np.int64), *self._noted]))]
        self._count = len(self._noted[0])
        return self._noted[0]

    def close(self) -> None:
        if self._note in self._table.leaving:
            self._table.leaving.remove(self._note)


class LeavingOnArrival(LeavingRows):
    """They freeze when they are told to, and no push steps any row of the source from then on."""

    def __init__(self, rows: TableRows, slots: Collection[int]) -> None:
        super().__init__(rows, slots)
        self._changed: list[ChangedIds] = []

    def begin(self) -> None:
        """From now on what changes is remembered."""
        self._changed = [ChangedIds(table, self._flags) for table in self._rows.tables]

    def rest(self) -> Parts:
        """Ids without a row now have no content."""
        for number, (table, changed) in enumerate(zip(self._rows.tables, self._changed, strict=True)):
            ids = changed.ids()
            now = table.rows_of(ids)
            gone = ids[~np.isin(ids, now.ids)]
            none = RowsOfIds(gone, np.zeros(len(gone), np.uint64), np.zeros((len(gone), table.width), np.float32))
            yield from portions(number, table, RowPart.BEFORE, none)
            yield from portions(number, table, RowPart.NOW, now)
            yield from self._sketches(number, table)

    def described(self) -> tuple[MovedTable, ...]:
        return tuple(moved.with_fields(before=False) for moved in super().described())

    def release(self) -> None:
        for changed in self._changed:
            changed.close()


class ArrivingOnArrival(ArrivingRows):
    """No step is common to source and target, so the rows of neither are ahead."""

    on_arrival = True

    def lags(self, version: int) -> bool:  # noqa: ARG002
        return False

    def adopt(self) -> None:
        self._put_sketches()
        for table, updates in zip(self.rows.tables, self._updates, strict=True):
            table.updates = max(table.updates, updates)
        self.rows.adopt_at_once(self._flags, self.version)
