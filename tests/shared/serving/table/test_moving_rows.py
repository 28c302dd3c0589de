"""Rows that move with their slots while steps go on: whatever comes in which order, they are those of a
parameter server that has them all."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import PLAIN, layout_of
from tests.shared.serving.table.tables import carry
from trireme_shared.protocol.errors import BadFrame, NotReady
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.table.moving import ArrivingRows, LeavingRows, RowPart
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.snapshot import to_records
from trireme_shared.tables.table import joined

SLOTS, LANES, MEMBERS = 16, 2, 3
INIT = RowInit(kind="uniform", scale=0.5)
SPECS = (
    TableSpec(
        name="counted",
        dim=2,
        seed=5,
        optimizer=RowOptimizer(kind="adam", lr=0.1),
        init=INIT,
        admit_after=3,
        evict_after_steps=4,
    ),
    TableSpec(
        name="small", dim=3, seed=6, optimizer=RowOptimizer(kind="adagrad", lr=0.5), init=INIT, max_rows=48
    ),
)
LAYOUT = layout_of(40, optimizer=PLAIN).model_copy(update={"tables": SPECS, "slot_count": SLOTS})
EVERY = [np.arange(60), np.arange(100)]
Lane = tuple[list[np.ndarray], list[np.ndarray], int]


def lane_of(rng: random.Random) -> Lane:
    keys = [np.array(sorted(rng.sample(range(len(every)), rng.randint(0, 12))), np.int64) for every in EVERY]
    noise = np.random.default_rng(rng.randrange(1 << 30))
    gradients = [
        noise.standard_normal((len(some), spec.dim)).astype(np.float32)
        for some, spec in zip(keys, SPECS, strict=True)
    ]
    return keys, gradients, rng.choice([0, 1, 1, 2])


def step_at_once(rows: TableRows) -> None:
    if rows.is_whole:
        list(rows.steps())


def records(members: list[TableRows]) -> list[bytes]:
    """All rows of each table, wherever they lie, and the sketches."""
    found = []
    for number, spec in enumerate(SPECS):
        tables = [rows.tables[number] for rows in members]
        rows = [table.read_slot(slot) for table in tables for slot in table.slots()]
        found.append(to_records(joined(rows, spec.row_words)).tobytes())
        if tables[0].sketch is not None:
            found.append(np.bitwise_or.reduce([table.sketch for table in tables]).tobytes())
    return found


@dataclass
class Move:
    source: int
    target: int
    slots: list[int]
    leaving: LeavingRows
    arriving: ArrivingRows
    early: object
    frozen: bool = False
    whole: bool = False


@dataclass
class Job:
    """Parameter servers, the slot map, one move at a time, and lanes that are pushed by slot maps that may be
    old."""

    rng: random.Random
    map: SlotMap = field(default_factory=lambda: SlotMap(version=1, owners=(0,) * SLOTS))
    move: Move | None = None
    moved: int = 0
    late: int = 0

    def __post_init__(self) -> None:
        self.members = [TableRows(LAYOUT, LANES, 0) for _ in range(MEMBERS)]
        self.joined = {0}
        self.alone = TableRows(LAYOUT, LANES, 0)

    def step(self, number: int) -> None:
        """Until all have the next version; moves go on meanwhile."""
        lanes = [lane_of(self.rng) for _ in range(LANES)]
        for lane, content in enumerate(lanes):
            self.alone.push(number, lane, *content)
        step_at_once(self.alone)
        by = [self.map] * LANES
        due = {(lane, index) for lane in range(LANES) for index in set(self.map.owners)}
        for _ in range(4000):
            if self.rng.random() < 0.4:
                self.go_on_moving()
            elif due:
                self.push(number, lanes, by, due, self.rng.choice(sorted(due)))
            elif all(self.members[index].version == number + 1 for index in set(self.map.owners)):
                return
        pytest.fail(f"step {number} is never whole: {due}, {self.move}, {self.members}")

    def push(
        self, number: int, lanes: list[Lane], by: list[SlotMap], due: set, chosen: tuple[int, int]
    ) -> None:
        lane, index = chosen
        keys, gradients, count = lanes[lane]
        rows, owners = self.members[index], np.array(by[lane].owners)
        mine = [
            owners[slots_of(some, spec.seed, SLOTS)] == index for some, spec in zip(keys, SPECS, strict=True)
        ]
        ids = [some[own] for some, own in zip(keys, mine, strict=True)]
        if rows.are_by(by[lane].version, self.map) and rows.are_owned(ids, self.map, index):
            verdict = rows.push(
                number, lane, ids, [each[own] for each, own in zip(gradients, mine, strict=True)], count
            )
        else:
            verdict = Verdict.WRONG_OWNER
        if verdict in (Verdict.APPLIED, Verdict.DUPLICATE):
            due.discard(chosen)
            step_at_once(rows)
        elif by[lane].version != self.map.version:
            pairs = zip(by[lane].owners, self.map.owners, strict=True)
            changed = {owner for was, now in pairs if was != now for owner in (was, now)} | {index}
            due -= {(lane, owner) for owner in changed}
            due |= {(lane, owner) for owner in changed & set(self.map.owners)}
            by[lane] = self.map

    def go_on_moving(self) -> None:
        if self.move is None:
            self.begin()
            return
        move = self.move
        part = next(move.early, None)
        if part is not None:
            carry(self.rng, move.arriving, [part])
        elif not move.frozen:
            move.frozen = move.leaving.frozen
            if not move.frozen and move.leaving.idle and self.rng.random() < 0.1:
                move.leaving.freeze()
        elif not move.whole:
            carry(self.rng, move.arriving, move.leaving.rest())
            joins = move.target not in self.joined
            try:
                move.arriving.complete(move.leaving.described(), move.leaving.version, joins=joins)
            except NotReady:
                return
            move.whole = True
        elif self.rng.random() < 0.2:
            self.end(drop=self.rng.random() < 0.15)

    def begin(self) -> None:
        source, target = self.rng.sample(range(MEMBERS), 2)
        own = [slot for slot, owner in enumerate(self.map.owners) if owner == source]
        if not own:
            return
        slots = self.rng.sample(own, self.rng.randint(1, max(1, len(own) * 2 // 3)))
        leaving = LeavingRows(self.members[source], slots)
        self.move = Move(source, target, slots, leaving, ArrivingRows(self.members[target], slots), iter(()))
        leaving.begin()
        self.move.early = leaving.early()

    def end(self, *, drop: bool) -> None:
        move = self.move
        assert move is not None
        self.move = None
        if drop:
            move.leaving.thaw()
            move.arriving.release()
            return
        owners = [move.target if slot in move.slots else owner for slot, owner in enumerate(self.map.owners)]
        self.map = SlotMap(version=self.map.version + 1, owners=tuple(owners))
        source, target = self.members[move.source], self.members[move.target]
        source.drop(np.array(sorted(move.slots)))
        source.give_back_at_once()
        if move.target not in self.joined:
            target.begin_at(move.arriving.version)
            self.joined.add(move.target)
        self.late += move.arriving.version < target.newest
        move.arriving.adopt()
        if move.source not in self.map.owners:
            self.joined.discard(move.source)
        source.since = target.since = self.map.version
        self.moved += 1

    def found(self, version: int, number: int) -> np.ndarray:
        """All ids of a table, asked of their owners."""
        every, spec = EVERY[number], SPECS[number]
        out = np.full((len(every), spec.dim), np.nan, np.float32)
        owners = np.array(self.map.owners)[slots_of(every, spec.seed, SLOTS)]
        for index in set(self.map.owners):
            rows = self.members[index]
            assert rows.judge(version) is None, (version, rows)
            ids = [every[owners == index] if n == number else every[:0] for n in range(len(SPECS))]
            out[owners == index] = np.frombuffer(rows.lookup(version, ids), np.float32).reshape(-1, spec.dim)
        return out

    def check(self, version: int) -> None:
        for number, spec in enumerate(SPECS):
            for wanted in (version, version - 1):
                ids = [EVERY[n] if n == number else EVERY[n][:0] for n in range(len(SPECS))]
                expected = np.frombuffer(self.alone.lookup(wanted, ids), np.float32).reshape(-1, spec.dim)
                assert np.array_equal(self.found(wanted, number), expected), (spec.name, version, wanted)


def played(seed: int, steps: int = 25) -> Job:
    job = Job(random.Random(seed))
    for number in range(steps):
        job.step(number)
        job.check(number + 1)
    if job.move is not None:
        job.end(drop=True)
    assert records(job.members) == records([job.alone]), seed
    return job


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.soak)], ids=str)
def test_rows_that_move_are_those_of_one_that_has_them_all(seeds):
    jobs = [played(seed) for seed in seeds]
    assert sum(job.moved for job in jobs) > 5 * len(seeds)
    assert sum(job.late for job in jobs) > 2  # the target had made the step that they lacked


def without(name: str, instead: object, of: type = LeavingRows) -> Callable:
    return lambda: replaced(of, name, instead)


def rest_but(left_out: RowPart) -> Callable:
    whole = LeavingRows.rest

    def rest(self: LeavingRows):
        return ((part, payload) for part, payload in whole(self) if part.name != left_out)

    return without("rest", rest)


def merged(self: TableRows, slots, version, before) -> None:
    """Whatever their version is, they are rows like all others."""
    for table, changed in zip(self.tables, before, strict=True):
        table.apart[slots] = False
        table.join_before(changed)


def nothing_before(self: TableRows, slots, version, before) -> None:
    adopt(self, slots, version, [joined([], table.width) for table in self.tables])


def push_always(self: TableRows, *arguments) -> Verdict:
    kept, self.freeze_at = self.freeze_at, None
    try:
        return push(self, *arguments)
    finally:
        self.freeze_at = kept


adopt, push = TableRows.adopt, TableRows.push
ABLATIONS = {
    "sketches": rest_but(RowPart.SKETCH),
    "rows that changed": rest_but(RowPart.NOW),
    "rows that left": without("remove", lambda *_: None, ShardedTable),
    "rows that expired": without("remove_expired", lambda *_: None, ShardedTable),
    "version before": without("adopt", nothing_before, TableRows),
    "late slots": without("adopt", merged, TableRows),
    "freeze": without("push", push_always, TableRows),
    "slot map of pushes": without("are_by", lambda *_: True, TableRows),
}


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_without_it_rows_are_lost_or_wrong(name):
    for seed in range(12):
        with ABLATIONS[name](), suppress(AssertionError, BadFrame, pytest.fail.Exception):
            played(seed)
            continue
        return
    pytest.fail(f"nothing was wrong without: {name}")
