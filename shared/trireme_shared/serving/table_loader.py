"""The rows of embedding tables, out of the parts of a checkpoint into tables in memory; those of own slots.

part, then those that it builds on, newest first --some slots at a time--> rows that no newer part tells of
    --> tables

Beside the tables there is memory for the slots that are being read alone. Whether a part is as it was written
is known when it was read to its end: until then the tables must not be used, and after an error never.
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
    check_form,
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
    from trireme_shared.tables.sharded import ShardedTable
    from trireme_shared.tables.snapshot import Chain
    from trireme_shared.tables.table import RowsOfIds  # loads numba


class TableLoader:
    """`load` each part that has rows of own slots."""

    def __init__(self, rows: TableRows, index: int, slots: SlotMap, ref: CheckpointRef) -> None:
        self._tables: dict[str, ShardedTable] = {table.spec.name: table for table in rows.tables}
        self._own = owned_slots(slots.owners, index)
        self._rows = rows
        self.ref = ref
        self._chains: dict[str, Chain] = {}
        self._read: tuple[str, str, Records] | None = None  # the tensor that is being read
        self._memory = np.empty(0, np.int64)  # of one tensor after the other
        self._older_by = 0  # what the stamps of the part that is read lack
        self._links = 0  # parts that follow in the chain

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

        self._chains = {name: Chain() for name in self._tables}
        self._older_by = 0 if part.rows_version is None else self._rows.version - part.rows_version
        self._links = len(part.chain)
        summary = stored.read_part(storage_url, self.ref, part, lambda entry: self._place(entry, other))
        self._pass_on()
        self._take_facts(summary)
        for link in reversed(part.chain):
            self._links -= 1
            for chain in self._chains.values():
                chain.next_older()
            stored.read_part(storage_url, self.ref, link, lambda entry: self._place(entry, lambda _: None))
            self._pass_on()
        self._chains, self._memory = {}, np.empty(0, np.int64)
        return summary

    def _place(self, entry: Entry, other: Sink) -> memoryview | None:
        """Memory for the tensor, once what was read before is in the tables. Raises CheckpointUnusable."""
        self._pass_on()
        named = table_in(entry.name)
        if named is None:
            return other(entry)
        table, what = named
        if what == EXPIRED:
            return None
        check_form(entry, self._words(table, what), self.ref, ids=what == REMOVED)
        size = entry.bytes // 8
        if len(self._memory) < size:
            self._memory = np.empty(size, np.int64)
        self._read = table, what, self._memory[:size].reshape(entry.shape)
        return self._read[2].data.cast("B")

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

    def _pass_on(self) -> None:
        """The tensor before is read by now."""
        if self._read is None:
            return
        (name, what, records), self._read = self._read, None
        table, chain = self._tables[name], self._chains[name]
        if what == REMOVED:
            chain.gone(records.copy())
        elif what == "sketch":
            self._take_sketch(table, records)
        else:
            rows = chain.rows(self._mine(table, records), last=not self._links)
            if chain.is_one:  # slots that have none yet
                table.put_rows(rows)
            elif len(rows):
                table.put(rows)

    def _take_sketch(self, table: ShardedTable, records: Records) -> None:
        """Of slots that no newer part tells of. Raises CheckpointUnusable: the part is damaged."""
        slots = records[:, 0]
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self._own):
            stored.unusable(self.ref, f"it counts ids of slots that are not among the job's {len(self._own)}")
        assert table.sketch is not None
        fresh = self._own[slots] & (table.sketch_stamps[slots] == 0)
        table.sketch[slots[fresh]] = records[fresh, 1:].view(np.uint8)
        table.sketch_stamps[slots[fresh]] = table.version

    def _mine(self, table: ShardedTable, records: Records) -> RowsOfIds:
        from trireme_shared.tables.snapshot import from_records  # noqa: PLC0415  loads numba

        rows = from_records(records, table.width, self._older_by)
        mine = self._own[slots_of(rows.ids, table.spec.seed, table.slot_count)]
        return rows if mine.all() else rows.where(mine)
