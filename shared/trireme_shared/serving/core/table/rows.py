"""The embedding tables of one parameter server: like a block, they have one version, take each lane of a step
once, and keep the version before.

    version s --gradients of lane--> waits --all lanes--> steps(), some rows at a time --> version s + 1
    asynchronous:  version v --gradients of a push--> apply(), some rows at a time --> version v + 1

All tables step together. A lane without an id of a table pushes no ids, but it pushes: so it is known that
none is missing.

Slots that came from another parameter server may be at the version before, as this one had all lanes of its
own rows already. They take the lanes of that step by themselves and make it later; until then the version of
all is theirs. One set of slots freezes by all rows of its owner taking no push.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.job_choices import SNAPSHOT_BYTES, Narrow
from trireme_shared.protocol.records.layout import Layout, schedule_factor
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.asynchronous import divisor
from trireme_shared.tables.hashing import owned_slots
from trireme_shared.tables.lanes import LaneRows, means_over_lanes
from trireme_shared.tables.memory import HASHES, Floats, Numbers
from trireme_shared.tables.payload import (
    ID_BYTES,
    NUMBER_BYTES,
    cast_some,
    ids_in,
    narrow_bytes,
    rows_in,
)
from trireme_shared.tables.payload import joined as payload_of
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import TableSnapshot, new_lock, record_words
from trireme_shared.tables.table import Flags, RowsOfIds, joined, living

LOCK_S = 0.001  # that the event loop waits for the lock
PORTION_BYTES = 4 << 20  # of a whole table in one answer: milliseconds
LIMIT_S = 30.0  # without a slot that is written, until snapshots are given up


@dataclass(slots=True)
class KeptRows:
    """How many rows steps of one parameter server may keep for snapshots that are being written: beyond
    `most_bytes` the next step waits, as long as slots are written. After LIMIT_S without any, the snapshots
    are given up. `waited_s`: seconds that steps have waited."""

    most_bytes: int = SNAPSHOT_BYTES
    waited_s: float = 0.0
    _begun: float | None = None  # since when a step waits
    _moved: float = 0.0  # when a slot was seen to be written
    _read: int = 0

    def may_step(self, snapshots: Sequence[TableSnapshot], now: float) -> bool:
        """Whether the next step may begin; ask again soon if not. So what is kept is `most_bytes`, and the
        rows of one step, at most."""
        snapshots = [each for each in snapshots if each.is_open]
        kept, read = sum(each.kept_bytes for each in snapshots), sum(each.slots_read for each in snapshots)
        if kept <= self.most_bytes:
            self._end(now)
            return True
        if self._begun is None:
            self._begun = self._moved = now
            self._read = read
        if read != self._read:
            self._read, self._moved = read, now
        if now - self._moved < LIMIT_S:
            return False
        problem = InvalidArgument(
            f"steps kept {kept} bytes of rows for it, {self.most_bytes} are allowed, and none were "
            f"written for {LIMIT_S:g} s",
            hint="look at the storage, which is slow or does not answer",
        )
        for each in snapshots:
            each.give_up(problem)
        self._end(now)
        return True

    def _end(self, now: float) -> None:
        if self._begun is not None:
            self.waited_s += now - self._begun
            self._begun = None


@dataclass(slots=True, eq=False)
class RowsPart:
    """Slots that take lanes and step together: those of one parameter server, or some that came later.
    `slots`: bool (slots,)."""

    slots: Flags
    version: int
    waiting: dict[int, list[LaneRows]] = field(default_factory=dict)

    def judge(self, step: int, lane: int) -> Verdict | None:
        """Why it takes nothing of a lane; None: it takes it."""
        if self.version > step or (self.version == step and lane in self.waiting):
            return Verdict.DUPLICATE
        return Verdict.TOO_EARLY if self.version < step else None


class TableRows:
    """`tables`: in the layout's order. `freeze_at`: the version that freezes them: then they are read, and
    take no push. `since`: the slot map since which they are the rows of the same slots."""

    def __init__(self, layout: Layout, lanes: int, version: int) -> None:
        self.lanes = lanes
        self.tables = [ShardedTable(spec, layout.slot_count, version) for spec in layout.tables]
        self.dims = [spec.dim for spec in layout.tables]
        self.freeze_at: int | None = None
        self.since = 0
        self.slot_count, self._first_options = layout.slot_count, layout.optimizer.groups
        self._owned_by: tuple[SlotMap, int] | None = None  # what `_owned` is of
        self._owned = np.zeros(0, np.bool_)
        self._main = RowsPart(np.ones(layout.slot_count, np.bool_), version)  # all slots but those of `_late`
        self._late: list[RowsPart] = []
        self._made: RowsPart | None = None  # the part that makes its step
        self.changing = False  # nothing can be read
        self._lock = new_lock()  # held while they are stepped
        self._held_for_dropped = False  # until snapshots have rows that were dropped
        self.snapshots: list[TableSnapshot] = []  # that may be open still
        self.kept = KeptRows()

    def __repr__(self) -> str:
        late = f", {len(self._late)} late" if self._late else ""
        return (
            f"<TableRows version {self.version}: {len(self._main.waiting)} of {self.lanes} "
            f"lanes{late}, {self.tables}>"
        )

    @property
    def version(self) -> int:
        """That all of them have reached."""
        return min(part.version for part in (self._main, *self._late))

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def bytes(self) -> int:
        return sum(table.bytes for table in self.tables)

    @property
    def handed_bytes(self) -> int:
        """That all rows would have on their way to other parameter servers."""
        sketches = (0 if table.sketch is None else table.sketch.shape[1] for table in self.tables)
        return int(self._owned.sum()) * sum(sketches) + sum(
            table.rows * 8 * record_words(table.width) for table in self.tables
        )

    @property
    def lanes_there(self) -> frozenset[Interval]:
        """Of the step under way; those that all rows have which lack it."""
        behind = [part.waiting.keys() for part in (self._main, *self._late) if part.version == self.version]
        return frozenset((lane, lane + 1) for lane in frozenset[int].intersection(*map(frozenset, behind)))

    @property
    def stepping(self) -> bool:
        return self._made is not None

    @property
    def newest(self) -> int:
        """The version of all but late ones."""
        return self._main.version

    @property
    def even(self) -> bool:
        """Whether all of them are at one version, and none is being stepped."""
        return not (self.stepping or self._late)

    @property
    def idle(self) -> bool:
        """Whether they have nothing of the step under way."""
        return self.even and not self._main.waiting

    @property
    def frozen(self) -> bool:
        return self.freeze_at is not None and self.freeze_at <= self.version and not self.stepping

    @property
    def is_whole(self) -> bool:
        """Whether all lanes of a step are there, and `steps` has to be run."""
        return not self.stepping and bool(self._next())

    def _next(self) -> RowsPart | None:
        """The part that can make a step. Late ones do not go ahead."""
        if len(self._main.waiting) == self.lanes:
            return self._main
        behind = (part for part in self._late if part.version < self._main.version)
        return next((part for part in behind if len(part.waiting) == self.lanes), None)

    # ------------------------------------------------------------ pushes

    def read(
        self, counts: Sequence[int], payload: memoryview, dtype: Narrow | None = None
    ) -> tuple[list[Numbers], list[Floats]]:
        """Ids and gradients (sent as `dtype`) of each table; may be views. Raises BadFrame."""
        ids = ids_in(payload, counts, self.dims, rows=True, dtype=dtype)
        return ids, rows_in(payload, counts, self.dims, ids=True, dtype=dtype)

    def are_owned(self, ids: Sequence[Numbers], slots: SlotMap | None, index: int) -> bool:
        """Whether all of these ids belong to the slots of parameter server `index`."""
        if slots is None:
            return True
        if self._owned_by != (slots, index):
            self._owned_by, self._owned = (slots, index), owned_slots(slots.owners, index)
        return all(table.are_all_in(self._owned, some) for some, table in zip(ids, self.tables, strict=True))

    def are_by(self, version: int, slots: SlotMap | None) -> bool:
        """Whether slot map `version` gives the same slots to these rows: what went by it has all of their
        ids, and no others. 0: not checked."""
        return not version or slots is None or self.since <= version <= slots.version

    def push(
        self, step: int, lane: int, ids: Sequence[Numbers], gradients: Sequence[Floats], count: int
    ) -> Verdict:
        """The sums of a lane's gradients by id, which are kept. `count`: records of the lane's minibatch.
        MOVING: they are frozen."""
        lacking, verdict = [], Verdict.DUPLICATE
        for part in (self._main, *self._late):
            judged = part.judge(step, lane)
            if judged is Verdict.TOO_EARLY:
                return judged
            if judged is None:
                lacking.append(part)
        if lacking and self.frozen:
            return Verdict.MOVING
        for part in lacking:
            part.waiting[lane] = self._of_part(part, ids, gradients, count)
            verdict = Verdict.APPLIED
        return verdict

    def _of_part(
        self, part: RowsPart, ids: Sequence[Numbers], gradients: Sequence[Floats], count: int
    ) -> list[LaneRows]:
        if not self._late:
            return [LaneRows(some, rows, count) for some, rows in zip(ids, gradients, strict=True)]
        found = []
        for table, some, rows in zip(self.tables, ids, gradients, strict=True):
            own = table.are_in(part.slots, some)
            found.append(LaneRows(some[own], rows[own], count))
        return found

    def steps(self, lane_zero: LaneZero | None = None) -> Iterator[None]:
        """All steps that can be made; some milliseconds of work between two values. Rows can be read while
        room is made for new ones, not while they change. `lane_zero`: of the step, with the options of the
        optimizer's groups in it."""
        self._made = self._next()
        return self._steps(self._factor(lane_zero))

    def _steps(self, factor: float) -> Iterator[None]:
        yield from self._locked()
        try:
            while (part := self._next()) is not None:
                self._made = part
                yield from self._step(part, factor)
        finally:
            self._lock.release()
        self._late = [
            part
            for part in self._late
            if part.version < self._main.version or part.waiting or self._main.waiting
        ]
        if not self._late:
            self._main.slots[:] = True
        self._made = None

    def _step(self, part: RowsPart, factor: float) -> Iterator[None]:
        lanes, means = [part.waiting[lane] for lane in range(self.lanes)], []
        for number, table in enumerate(self.tables):
            mean = yield from means_over_lanes([lane[number] for lane in lanes], table.spec.dim)
            means.append(mean)
            yield from table.prepare(mean[0])
        self.changing = True
        for table, mean in zip(self.tables, means, strict=True):
            rate = table.spec.optimizer.rate(factor)
            if part is self._main:
                table.apart |= ~part.slots  # late ones are a step behind from now on
                yield from table.steps(*mean, rate)
            else:
                yield from table.catch_up(part.slots, *mean, rate)
        part.waiting = {}
        part.version += 1
        self.changing = False

    def apply(
        self,
        ids: Sequence[Numbers],
        gradients: Sequence[Floats],
        count: int,
        lane_zero: LaneZero | None = None,
        ahead: int = 0,
    ) -> Iterator[None]:
        """Asynchronous: a step of the rows of one push; some milliseconds of work between two values.
        `count`: records that they are of; 0: it had no data, and only time goes on. `lane_zero`: see `steps`.
        `ahead`: versions since the rows were looked up; the rate is divided by them. Raises InvalidArgument:
        nothing has changed."""
        factor = self._factor(lane_zero)
        ids = [some.copy() if count else some[:0].copy() for some in ids]  # the version before keeps them
        self._made = self._main
        yield from self._locked()
        try:
            for table, some in zip(self.tables, ids, strict=True):
                yield from table.prepare(some)  # what can fail, before anything changes
            self.changing = True
            for table, some, own in zip(self.tables, ids, gradients, strict=True):
                rate = table.spec.optimizer.rate(factor) / divisor(ahead)
                yield from table.steps(some, own if count else None, rate)
            self._main.version += 1
            self.changing = False
        finally:
            self._lock.release()
            if not self.changing:
                self._made = None

    def _locked(self) -> Iterator[None]:
        """A thread of low priority that reads a snapshot may have the lock."""
        yield from self.give_back()
        while not self._lock.acquire(timeout=LOCK_S):
            yield

    def _factor(self, lane_zero: LaneZero | None) -> float:
        return 1.0 if lane_zero is None else schedule_factor(self._first_options, lane_zero.options)

    def go_on_from(self, version: int) -> None:
        """That of rows which were loaded."""
        self._main.version = version
        for table in self.tables:
            table.start_at(version)

    def copies(self, slots: Flags | None = None) -> list[TableSnapshot]:
        """Of all tables at their version; the caller closes them. `slots`: of the rows of these slots
        alone."""
        assert not self.changing, "a copy in the middle of a step"
        made = [TableSnapshot(table, self._lock, slots) for table in self.tables]
        self.snapshots = [*(each for each in self.snapshots if each.is_open), *made]
        return made

    def give_up_copies(self, cause: str) -> None:
        """Whoever reads one hears why, and keeps the memory of the rows no longer than that takes."""
        for each in self.snapshots:
            if each.is_open:
                each.give_up(InvalidArgument(cause))
        self.snapshots = []

    def forget_removed(self, versions: Mapping[str, int]) -> None:
        """No delta will be made on versions of a table before these."""
        for table in self.tables:
            table.removed.forget(versions.get(table.spec.name, 0))

    # ------------------------------------------------------------ slots that move

    def begin_at(self, version: int) -> None:
        """No slot is here yet; the first that are adopted are at this version."""
        assert not self.stepping
        self._main, self._late = RowsPart(np.ones(self.slot_count, np.bool_), version), []
        for table in self.tables:
            table.begin_at(version)

    def adopt(self, slots: Flags, version: int, before: Sequence[RowsOfIds | None]) -> None:
        """Slots whose rows are in the tables, apart. `version`: that of the others, or one less. `before`: of
        each table, the rows that the last step of these slots changed, as they were; None: not known."""
        assert version <= self._main.version, (version, self)
        makes_step = self._made is self._main
        behind = version < self._main.version + makes_step
        for table, changed in zip(self.tables, before, strict=True):
            if version == self._main.version and not (makes_step and self.changing):
                table.join_before(changed)
            if not behind:
                table.apart[slots] = False
        if behind or self._main.waiting:
            self._main.slots &= ~slots
            self._late.append(RowsPart(slots.copy(), version))

    def adopt_at_once(self, slots: Flags, version: int) -> None:
        """Asynchronous: slots whose rows are in the tables, apart, stamped by a parameter server at
        `version`. They are as old here as they were there."""
        held = self._held_for_dropped
        if not held:
            self._lock.acquire()
        try:
            for table in self.tables:
                table.restamp(slots, version, table.version - version)
                table.apart[slots] = False
        finally:
            if not held:
                self._lock.release()

    def drop(self, slots: Numbers) -> None:
        """They belong to another parameter server now; the others go on. Their memory is taken until
        `give_back`, and who reads a snapshot waits for it."""
        assert not self.stepping
        if any(table.leaving for table in self.tables) and not self._held_for_dropped:
            self._lock.acquire()
            self._held_for_dropped = True
        for table in self.tables:
            table.drop_slots(slots)
        self.freeze_at = None

    def give_back(self) -> Iterator[None]:
        """The memory of slots that were dropped; about a millisecond of work between two values. Several may
        do it by turns; a step does it first."""
        while (table := next((table for table in self.tables if table.has_dropped), None)) is not None:
            yield from table.give_back()
        if self._held_for_dropped:
            self._held_for_dropped = False
            self._lock.release()

    def give_back_at_once(self) -> None:
        for _ in self.give_back():
            pass

    @property
    def has_dropped(self) -> bool:
        """Whether `give_back` has something to do."""
        return self._held_for_dropped or any(table.has_dropped for table in self.tables)

    # ------------------------------------------------------------ lookups

    def judge(self, version: int | None) -> Verdict | None:
        """Why `version` (None: the newest one) cannot be read now; None: it can."""
        version = self.version if version is None else version
        if version > self.version or self.changing:
            return Verdict.TOO_EARLY
        newest, kept = self._main.version, all(table.has_before for table in self.tables)
        return None if version == newest or (version == newest - 1 and kept) else Verdict.GONE

    def lookup(self, version: int | None, ids: Sequence[Numbers], dtype: Narrow | None = None) -> memoryview:
        """The values of all ids, as a payload of rows. Raises OverflowError: a value does not fit `dtype`."""
        reading = RowsReading(self, version, ids, dtype)
        while not reading.go_on():
            pass
        return reading.payload

    # ------------------------------------------------------------ whole tables

    def rows_in_table(self, number: int) -> int:
        """That have memory. Raises InvalidArgument."""
        if number >= len(self.tables):
            raise InvalidArgument(f"table {number} was asked for: the model has {len(self.tables)}")
        return self.tables[number].rows

    def portion(self, number: int, first: int, part: int = 0) -> tuple[int, memoryview, int, int]:
        """Of a table at the newest version, which none of them lacks, the rows of slots from `first` on that
        go into one answer, of that one those whose hash is at least `part`: how many, the payload (ids,
        rows), the first slot that is not whole in it, and its part."""
        table = self.tables[number]
        counts, dim = table.counts_by_slot(), table.spec.dim
        left, slot = float(PORTION_BYTES // (ID_BYTES + NUMBER_BYTES * dim)), first
        found: list[RowsOfIds] = []
        while slot < self.slot_count:
            count = float(counts[slot]) * (HASHES - part) / HASHES
            if count > left and found:
                break
            last = min(HASHES, part + max(1, int(left * HASHES / counts[slot]))) if count > left else HASHES
            if count:
                found.append(table.read_slot(slot, part, last))
                left -= count
            slot, part = (slot + 1, 0) if last == HASHES else (slot, last)
            if part:
                break
        whole = living(joined(found, table.width), table.spec, table.version)
        return len(whole), payload_of([whole.ids], [whole.content[:, :dim]]), slot, part


READ_AT_ONCE = 1 << 16  # ids of a lookup, in one turn: some milliseconds; of wide rows fewer
READ_NUMBERS = READ_AT_ONCE * 16  # float32


class RowsReading:
    """The values of ids at `version` (None: the newest one of the moment), some at a time: an event loop has
    its turns in between. Whether the version can be read (`TableRows.judge`) is asked before each `go_on`."""

    def __init__(
        self, rows: TableRows, version: int | None, ids: Sequence[Numbers], dtype: Narrow | None = None
    ) -> None:
        self._tables, self._version, self._ids = rows.tables, version, ids
        numbers = sum(len(some) * dim for some, dim in zip(ids, rows.dims, strict=True))
        self._values = np.empty(numbers, np.float32)
        self._narrow = None if dtype is None else torch.empty(numbers, dtype=DTYPES[dtype])
        self._table = self._first = self._done = 0  # the next table, the next of its ids, numbers read

    def __repr__(self) -> str:
        return f"<RowsReading of version {self._version}: {self._done} of {len(self._values)} numbers>"

    def go_on(self) -> bool:
        """Reads some more; answers whether that were the last ones. Raises OverflowError: a value does not
        fit the dtype."""
        ids_left, numbers_left, begun = READ_AT_ONCE, READ_NUMBERS, self._done
        while self._table < len(self._tables) and ids_left > 0 and numbers_left > 0:
            table, ids = self._tables[self._table], self._ids[self._table]
            dim = table.spec.dim
            some = ids[self._first : self._first + min(ids_left, max(1, numbers_left // dim))]
            last = self._done + len(some) * dim
            table.lookup(some, self._values[self._done : last].reshape(len(some), dim), self._version)
            ids_left, numbers_left = ids_left - len(some), numbers_left - len(some) * dim
            self._first, self._done = self._first + len(some), last
            if self._first == len(ids):
                self._table, self._first = self._table + 1, 0
        if self._narrow is not None:
            cast_some(self._narrow[begun : self._done], self._values[begun : self._done])
        return self._table == len(self._tables)

    @property
    def payload(self) -> memoryview:
        """Of all rows, once the last ones are read."""
        return self._values.data.cast("B") if self._narrow is None else narrow_bytes(self._narrow)
