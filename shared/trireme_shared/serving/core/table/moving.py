"""Rows of embedding tables that move with their slots from one parameter server (source) to another (target).

source   Leaving: all rows of the slots, while steps go on --> next version: frozen
             --> of the rows that the last step changed, what they were and what they are; the sketches
target   Arriving: rows apart in its tables --> whole: put right --the slot map says so--> `adopt`

So after the freeze only what one step has changed is sent, and the version before moves along. While they are
frozen, all rows of the source take no push: the step could not become whole anyway.

Asynchronous jobs (LeavingOnArrival, ArrivingOnArrival) have no version before, and each parameter server
counts versions for itself:

source   all rows of the slots; which of them pushes change or remove meanwhile is remembered
             --> frozen, between two pushes --> those again, as they are now; the sketches
target   rows apart in its tables --> whole: put right
             --the slot map says so--> `adopt`: as old here as they were there

What the slots have had by then is in the ledger that moves along (core/ledger.py): a push that was refused
meanwhile is due at the target, one that was taken is a duplicate there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.errors import BadFrame, NotReady
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import HandoffPart, MovedTable
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import from_records, record_words, to_records
from trireme_shared.tables.table import Flags, RowsOfIds, joined

Parts = Iterator[tuple[HandoffPart, memoryview]]
Sketch = npt.NDArray[np.uint8]
PART_BYTES = 1 << 20


class RowPart(StrEnum):
    """`HandoffPart.name` of rows. ROWS: sent early. BEFORE: what the last step changed, as it was; NOW: as it
    is. SKETCH: counts of ids without a row, of the slots in their order."""

    ROWS = "rows"
    BEFORE = "before"
    NOW = "now"
    SKETCH = "sketch"


def flags_of(slots: Collection[int], slot_count: int) -> Flags:
    found = np.zeros(slot_count, np.bool_)
    found[list(slots)] = True
    return found


class LeavingRows:
    """The rows of some slots of a parameter server, as `LeavingBlocks` of core/moving.py. `thaw` them if they
    stay; the rows that stay thaw when the slots are dropped. `release` them at the end, whatever became of
    them."""

    def __init__(self, rows: TableRows, slots: Collection[int]) -> None:
        self._rows, self._slots = rows, sorted(slots)
        self._flags = flags_of(slots, len(rows.tables[0].apart))

    def __repr__(self) -> str:
        return f"<LeavingRows of {len(self._slots)} slots{', frozen' if self.frozen else ''}>"

    @property
    def slots(self) -> list[int]:
        return self._slots

    @property
    def version(self) -> int:
        return self._rows.version

    @property
    def frozen(self) -> bool:
        return self._rows.frozen

    @property
    def idle(self) -> bool:
        """Whether nothing of a step is there."""
        return self._rows.idle

    def begin(self) -> None:
        self._rows.freeze_at = self._rows.version + 1

    def freeze(self) -> None:
        """As they are: nothing of a step is there."""
        self._rows.freeze_at = self._rows.version

    def early(self) -> Parts:
        """All rows. Those that a step changes meanwhile are sent again."""
        for number, table in enumerate(self._rows.tables):
            at_once, first = _at_once(table), 0
            for slot in self._slots:
                for rows in table.read_in_parts(slot, at_once):
                    yield _part(number, RowPart.ROWS, first), _payload(rows)
                    first += len(rows)

    def rest(self) -> Parts:
        for number, table in enumerate(self._rows.tables):
            before = table.before_of(self._flags)
            if before is not None:
                yield from portions(number, table, RowPart.BEFORE, before)
                yield from portions(number, table, RowPart.NOW, table.rows_of(before.ids))
            yield from self._sketches(number, table)

    def _sketches(self, number: int, table: ShardedTable) -> Parts:
        if table.sketch is None:
            return
        at_once = max(1, PART_BYTES // table.sketch.shape[1])
        for first in range(0, len(self._slots), at_once):
            counts = table.sketch[self._slots[first : first + at_once]]
            yield _part(number, RowPart.SKETCH, first, "uint8"), counts.data.cast("B")

    def described(self) -> tuple[MovedTable, ...]:
        return tuple(
            MovedTable(updates=table.updates, rows=table.count_in(self._flags), before=table.has_before)
            for table in self._rows.tables
        )

    def thaw(self) -> None:
        self._rows.freeze_at = None

    def release(self) -> None:
        """Nothing of it is sent any more."""


class ArrivingRows:
    """The target's end: `take` the parts, `complete` them, `adopt` them; or `release`. `rows`: of this
    parameter server, which get them; its tables may be without any version yet. `on_arrival`: of an
    asynchronous job."""

    on_arrival = False

    def __init__(self, rows: TableRows, slots: Collection[int]) -> None:
        self.rows, self.version = rows, 0
        self._slots = np.array(sorted(slots), np.int64)
        self._flags = flags_of(slots, len(rows.tables[0].apart))
        self._rest: dict[tuple[int, str, int], Numbers] = {}
        self._sketches: dict[tuple[int, int], Sketch] = {}
        self._before: list[RowsOfIds | None] = []
        self._updates: list[int] = []
        for table in rows.tables:
            table.apart |= self._flags

    def __repr__(self) -> str:
        return f"<ArrivingRows of {len(self._slots)} slots, version {self.version}>"

    def room_for(self, part: HandoffPart, size: int) -> Iterator[None]:
        """Waits until there is memory for the rows of a part, whatever it says; a millisecond between two
        values."""
        if part.table < len(self.rows.tables) and part.name in (RowPart.ROWS, RowPart.NOW):
            table = self.rows.tables[part.table]
            yield from table.room_for(min(size, PART_BYTES) // (8 * record_words(table.width)))

    def take(self, part: HandoffPart, payload: memoryview) -> None:
        """Copies; a repetition changes nothing. Raises BadFrame."""
        if part.table >= len(self.rows.tables) or part.name not in set(RowPart):
            raise BadFrame(
                f"part {part.name!r} of table {part.table} does not belong to the job's "
                f"{len(self.rows.tables)} tables"
            )
        table = self.rows.tables[part.table]
        if part.name == RowPart.SKETCH:
            width = 0 if table.sketch is None else table.sketch.shape[1]
            last = part.first + (payload.nbytes // width if width else 0)
            if not width or payload.nbytes % width or last > len(self._slots):
                raise BadFrame(
                    f"{payload.nbytes} bytes of sketches for {len(self._slots)} slots of {width} each"
                )
            self._sketches[part.table, part.first] = (
                np.frombuffer(payload, np.uint8).reshape(-1, width).copy()
            )
            return
        words = record_words(table.width)
        if payload.nbytes % (8 * words) or payload.nbytes > max(PART_BYTES, 8 * words):
            raise BadFrame(
                f"{payload.nbytes} bytes of rows: expected records of {8 * words}, at most {PART_BYTES}"
            )
        records = np.frombuffer(payload, np.int64).reshape(-1, words)
        foreign = ~table.are_in(self._flags, np.ascontiguousarray(records[:, 0]))
        if foreign.any():
            raise BadFrame(
                f"id {records[foreign, 0][0]} of table {table.spec.name} is in no slot of this group"
            )
        if part.name == RowPart.ROWS:
            table.put(from_records(records, table.width))
        else:
            self._rest[part.table, part.name, part.first] = records.copy()

    def lags(self, version: int) -> bool:
        """Whether the rows here lack a step that those of the group, at `version`, have made."""
        return version > self.rows.newest

    def complete(self, tables: tuple[MovedTable, ...], version: int, *, joins: bool) -> None:
        """The source says what the parts make. `joins`: the rows here have no version yet. Raises BadFrame:
        something is missing; NotReady: the rows here have to make a step first, which those of the group have
        made."""
        if not joins and self.lags(version):
            raise NotReady(
                f"rows here are at version {self.rows.newest}, those of the group at {version}: "
                "send them again"
            )
        if len(tables) != len(self.rows.tables):
            raise BadFrame(f"{len(tables)} tables are said to be whole: the job has {len(self.rows.tables)}")
        before = []
        for number, (table, moved) in enumerate(zip(self.rows.tables, tables, strict=True)):
            was, now = (
                self._collected(number, table, RowPart.BEFORE),
                self._collected(number, table, RowPart.NOW),
            )
            there = np.isin(was.ids, now.ids)
            table.remove(was.ids[~there])
            table.put(now)
            table.remove_expired(self._flags, version)
            if (found := table.count_in(self._flags)) != moved.rows:
                raise BadFrame(
                    f"table {table.spec.name} has {found} rows in the group's slots: the source "
                    f"sent {moved.rows}"
                )
            before.append(was if moved.before else None)
        self.version, self._before, self._updates = version, before, [moved.updates for moved in tables]

    def _collected(self, number: int, table: ShardedTable, name: RowPart) -> RowsOfIds:
        found = [
            from_records(part, table.width)
            for (n, of, _), part in sorted(self._rest.items())
            if (n, of) == (number, name)
        ]
        return joined(found, table.width)

    def adopt(self) -> None:
        """They are rows of the tables from now on. Each of them has been told at which version
        (`TableRows.begin_at`)."""
        self._put_sketches()
        for table, updates in zip(self.rows.tables, self._updates, strict=True):
            if self.version == table.version:
                table.updates = updates
        self.rows.adopt(self._flags, self.version, self._before)

    def _put_sketches(self) -> None:
        for (number, first), counts in self._sketches.items():
            self.rows.tables[number].put_sketch(self._slots[first : first + len(counts)], counts)
        for table in self.rows.tables:
            table.removed.lose(table.version)
        self._rest, self._sketches = {}, {}

    def release(self) -> None:
        """Nothing of it is needed."""
        self._rest, self._sketches = {}, {}
        for table in self.rows.tables:
            table.drop_slots(self._slots)


def _at_once(table: ShardedTable) -> int:
    return max(1, PART_BYTES // (8 * record_words(table.width)))


def _payload(rows: RowsOfIds) -> memoryview:
    return to_records(rows).data.cast("B")


def _part(table: int, name: RowPart, first: int, dtype: str = "int64") -> HandoffPart:
    return HandoffPart(block=ROWS, name=name, dtype=dtype, table=table, first=first)


def portions(number: int, table: ShardedTable, name: RowPart, rows: RowsOfIds) -> Parts:
    at_once = _at_once(table)
    for first in range(0, len(rows), at_once):
        yield _part(number, name, first), _payload(rows.where(slice(first, first + at_once)))


LEAST_NOTED = 1 << 16  # ids, from which on they are looked through for those that are there twice


class ChangedIds:
    """Ids of some slots (`flags`, bool (slots,)) whose rows pushes have changed or removed, or given them,
    since it was made. `close` it at the end."""

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
            none = RowsOfIds(
                gone, np.zeros(len(gone), np.uint64), np.zeros((len(gone), table.width), np.float32)
            )
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
