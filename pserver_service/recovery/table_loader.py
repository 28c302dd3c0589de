"""The rows of embedding tables, out of the parts of a checkpoint into a store; those of its own slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pserver_service.core.store import Store
from shared.checkpoints import stored
from shared.checkpoints.tables import Records, records_for, table_in, updates_in
from shared.errors import BadFrame
from shared.records import SlotMap
from shared.records.checkpoints import CheckpointPart, CheckpointRef
from shared.storage.tensor_file import Entry, Summary
from shared.tables.hashing import owned_slots, slots_of

if TYPE_CHECKING:
    from shared.tables.table import Table  # loads numba


class TableLoader:
    """`place` of each tensor of a part, then `take` once the part's checksum was right."""

    def __init__(self, store: Store, index: int, slots: SlotMap, ref: CheckpointRef) -> None:
        assert store.rows is not None
        self._tables: dict[str, Table] = {table.spec.name: table for table in store.rows.tables}
        self._own = owned_slots(slots.owners, index)
        self._rows = store.rows
        self._ref = ref
        self._read: list[tuple[str, str, Records]] = []

    @classmethod
    def of(cls, store: Store, index: int, slots: SlotMap, ref: CheckpointRef) -> TableLoader | None:
        """None: the model has no tables."""
        return None if store.rows is None else cls(store, index, slots, ref)

    def owners(self, slots: SlotMap) -> set[int]:
        """Who had the rows of the own slots by the checkpoint's slot map."""
        return {owner for owner, own in zip(slots.owners, self._own, strict=True) if own}

    @property
    def slots(self) -> int:
        """Bits of the own slots."""
        return sum(1 << slot for slot, own in enumerate(self._own) if own)

    def slots_from(self, owner: int, slots: SlotMap) -> int:
        """Bits of the own slots whose rows are in the part of `owner`, by the checkpoint's slot map."""
        return sum(1 << slot for slot, then in enumerate(slots.owners) if then == owner and self._own[slot])

    def go_on_from(self, parts: Iterable[CheckpointPart]) -> None:
        """Asynchronous: the highest version of all parts, so that no row is stamped later than that."""
        versions = [part.rows_version for part in parts if part.rows_version is not None]
        if versions:
            self._rows.go_on_from(max(versions))

    def place(self, entry: Entry) -> memoryview | None:
        """Memory for the tensor; None: it is of no table. Raises CheckpointUnusable."""
        named = table_in(entry.name)
        if named is None:
            return None
        table, what = named
        records = records_for(entry, self._words(table, what), self._ref)
        self._read.append((table, what, records))
        return records.data.cast("B")

    def _words(self, table: str, what: str) -> int | None:
        from shared.tables.snapshot import record_words  # noqa: PLC0415  loads numba

        found = self._tables.get(table)
        if found is None:
            return None
        if what == "sketch":
            return None if found.sketch is None else found.sketch.shape[1] // 8
        return record_words(found.width)

    def take(self, part: Summary, version: int | None) -> None:
        """What was read is used. `version`: by which its rows are stamped (None: that of all); a row is as old here as it was there. Raises CheckpointUnusable."""
        from shared.tables.snapshot import from_records  # noqa: PLC0415  loads numba

        try:
            updates = updates_in(part.metadata)
        except BadFrame as error:
            stored.unusable(self._ref, error.message, error)
        for name, table in self._tables.items():
            if name not in updates:
                stored.unusable(self._ref, f"it lacks table {name}: the job's tables are others")
            table.updates = max(table.updates, updates[name])
        for name, what, records in self._read:
            table = self._tables[name]
            if what == "sketch":
                assert table.sketch is not None
                mine = np.flatnonzero(self._own)
                table.sketch[mine] |= records.view(np.uint8)[mine]
                continue
            rows = from_records(records, table.width, 0 if version is None else self._rows.version - version)
            table.put_rows(rows.where(self._own[slots_of(rows.ids, table.spec.seed, table.slot_count)]))
        self._read.clear()
