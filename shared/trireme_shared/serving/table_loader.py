"""The rows of embedding tables, out of the parts of a checkpoint into tables in memory; those of own slots.

part, then those that it builds on, newest first --place, take--> rows that no newer part tells of
    --the whole part--> tables
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.tables import (
    EXPIRED,
    REMOVED,
    Records,
    ids_for,
    records_for,
    table_in,
    updates_in,
)
from trireme_shared.platform.storage.tensor_file import Entry, Sink, Summary
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef
from trireme_shared.tables.hashing import owned_slots, slots_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows
    from trireme_shared.tables.snapshot import Chain
    from trireme_shared.tables.table import RowsOfIds, Table  # loads numba


class TableLoader:
    """`load` each part that has rows of own slots."""

    def __init__(self, rows: TableRows, index: int, slots: SlotMap, ref: CheckpointRef) -> None:
        self._tables: dict[str, Table] = {table.spec.name: table for table in rows.tables}
        self._own = owned_slots(slots.owners, index)
        self._rows = rows
        self.ref = ref
        self._read: list[tuple[str, str, Records]] = []
        self._older_by = 0  # what the stamps of the part that is read lack

    @classmethod
    def of(cls, rows: TableRows | None, index: int, slots: SlotMap, ref: CheckpointRef) -> TableLoader | None:
        """None: the model has no tables."""
        return None if rows is None else cls(rows, index, slots, ref)

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

    def load(self, storage_url: str, part: CheckpointPart, other: Sink) -> Summary:
        """The rows of a part and of those that it builds on, as old here as they were there; `other` names
        the memory for its tensors that are of no table. What the part tells of itself. Raises
        CheckpointUnusable: the tables must not be used; OSError."""
        from trireme_shared.tables.snapshot import Chain  # noqa: PLC0415  loads numba

        chains = {name: Chain() for name in self._tables}
        newer: dict[str, dict[int, list[RowsOfIds]]] = {name: {} for name in self._tables}

        def place(entry: Entry) -> memoryview | None:
            return self._place(entry) if table_in(entry.name) is not None else other(entry)

        self._older_by = 0 if part.rows_version is None else self._rows.version - part.rows_version
        summary = stored.read_part(storage_url, self.ref, part, place)
        self._take_facts(summary)
        for link in reversed(part.chain):
            self._take_changes(chains, newer)
            stored.read_part(storage_url, self.ref, link, self._place)
        self._take_whole(chains, newer)
        return summary

    def _place(self, entry: Entry) -> memoryview | None:
        """Memory for the tensor; None: it is of no table. Raises CheckpointUnusable."""
        named = table_in(entry.name)
        if named is None or named[1] == EXPIRED:
            return None
        table, what = named
        words = self._words(table, what)
        records = ids_for(entry, self.ref) if what == REMOVED else records_for(entry, words, self.ref)
        self._read.append((table, what, records))
        return records.data.cast("B")

    def _words(self, table: str, what: str) -> int | None:
        from trireme_shared.tables.snapshot import record_words  # noqa: PLC0415  loads numba

        found = self._tables.get(table)
        if found is None:
            return None
        if what == "sketch":
            return None if found.sketch is None else 1 + found.sketch.shape[1] // 8
        return record_words(found.width)

    def _take_facts(self, part: Summary) -> None:
        """What the newest part alone tells. Raises CheckpointUnusable."""
        try:
            updates = updates_in(part.metadata)
        except BadFrame as error:
            stored.unusable(self.ref, error.message, error)
        for name, table in self._tables.items():
            if name not in updates:
                stored.unusable(self.ref, f"it lacks table {name}: the job's tables are others")
            table.updates = max(table.updates, updates[name])

    def _take_sketches(self) -> None:
        """Of slots that no newer part tells of."""
        for name, what, records in self._read:
            if what == "sketch":
                table, slots = self._tables[name], records[:, 0]
                assert table.sketch is not None
                fresh = self._own[slots] & (table.sketch_stamps[slots] == 0)
                table.sketch[slots[fresh]] = records[fresh, 1:].view(np.uint8)
                table.sketch_stamps[slots[fresh]] = table.version

    def _take_changes(self, chains: dict[str, Chain], newer: dict[str, dict[int, list[RowsOfIds]]]) -> None:
        """Of a delta: its rows wait for the whole part, slot by slot."""
        from trireme_shared.tables.table import by_slot  # noqa: PLC0415  loads numba

        self._take_sketches()
        for name, what, records in self._read:
            table, chain = self._tables[name], chains[name]
            if what == REMOVED:
                chain.gone(records)
            elif what != "sketch":
                for slot, rows in by_slot(
                    chain.rows(self._mine(table, records)), table.spec.seed, table.slot_count
                ):
                    newer[name].setdefault(slot, []).append(rows)
        for chain in chains.values():
            chain.next_older()
        self._read.clear()

    def _take_whole(self, chains: dict[str, Chain], newer: dict[str, dict[int, list[RowsOfIds]]]) -> None:
        from trireme_shared.tables.table import by_slot, joined  # noqa: PLC0415  loads numba

        self._take_sketches()
        for name, what, records in self._read:
            if what in ("sketch", REMOVED):
                continue
            table, waiting = self._tables[name], newer[name]
            rows = chains[name].rows(self._mine(table, records))
            if not waiting:
                table.put_rows(rows)
                continue
            for slot, some in by_slot(rows, table.spec.seed, table.slot_count):
                table.put_rows(joined([some, *waiting.pop(slot, ())], table.width))
        for name, waiting in newer.items():
            for left in waiting.values():
                self._tables[name].put_rows(joined(left, self._tables[name].width))
        self._read.clear()

    def _mine(self, table: Table, records: Records) -> RowsOfIds:
        from trireme_shared.tables.snapshot import from_records  # noqa: PLC0415  loads numba

        rows = from_records(records, table.width, self._older_by)
        return rows.where(self._own[slots_of(rows.ids, table.spec.seed, table.slot_count)])
