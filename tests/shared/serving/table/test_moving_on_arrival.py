"""Asynchronous: rows that move with their slots while pushes come. Whatever comes in which order, each slot
has each minibatch once."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import PLAIN, async_header, init_header, layout_of
from tests.shared.serving.table.tables import carry
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.layout import ROWS, RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.wire.messages import PushBlock, Verdict
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core import ledger
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.moving import ArrivingBlocks, LeavingBlocks, adopt, forget
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.core.table.moving import (
    ArrivingOnArrival,
    ChangedIds,
    LeavingOnArrival,
    LeavingRows,
    RowPart,
)
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.serving.core.table.stepping import ArrivedRows
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.memory import ages_of
from trireme_shared.tables.payload import joined

SLOTS, MEMBERS, MINIBATCHES, TASKS, TRAINERS = 16, 3, 6, 12, 2
ZEROS, SGD = RowInit(kind="constant", scale=0.0), RowOptimizer(kind="sgd", lr=1.0)
SPECS = (
    TableSpec(name="counted", dim=2, seed=5, optimizer=SGD, init=ZEROS),
    TableSpec(name="admitted", dim=1, seed=6, optimizer=SGD, init=ZEROS, admit_after=3),
)
NOT_ADMITTED = (0, 2)  # of the minibatches that an id is in, by table
LAYOUT = layout_of(40, optimizer=PLAIN).model_copy(
    update={"tables": SPECS, "slot_count": SLOTS, "segments": ()}
)
IDS = 40
Keys = list[np.ndarray]


def store_of(index: int, layout=LAYOUT) -> AsyncStore:
    """Without blocks: all that is pushed is rows."""
    store = AsyncStore(init_header(layout, Mode.ASYNC, 1, pserver=index))
    store.seal()
    return store


def keys_of(task: int, minibatch: int) -> Keys:
    rng = random.Random(f"{task}.{minibatch}")
    return [np.array(sorted(rng.sample(range(IDS), rng.randint(0, 8))), np.int64) for _ in SPECS]


def push(
    store: AsyncStore, index: int, keys: Keys, by: SlotMap, task: int, start: int, attempt: int = 1
) -> str:
    server = BlockServer("ctr", "ps-1")
    server.store, server.index = store, index
    pushing = OpenPush(server, store, async_header(task, start, start + 1, MINIBATCHES, attempt))
    counts = tuple(len(some) for some in keys)
    head = PushBlock(block=ROWS, lanes=(0, 1), count=2, rows=counts, slots=by.version)
    gradients = [np.ones((len(some), spec.dim), np.float32) for some, spec in zip(keys, SPECS, strict=True)]
    pushing.apply(head, memoryview(bytes(joined(keys, gradients))))
    answer = pushing.answer()
    if answer.refused:
        return answer.refused[0].code
    return Verdict.APPLIED if answer.applied else Verdict.DUPLICATE


@dataclass
class Trainer:
    """`due`: the parameter servers that its minibatch has to reach still; `by`: the slot map that says so."""

    task: int
    by: SlotMap
    minibatch: int = 0
    attempt: int = 1
    due: set[int] = field(default_factory=set)


@dataclass
class Move:
    source: int
    target: int
    slots: frozenset[int]
    leaving: LeavingBlocks
    arriving: ArrivingBlocks
    early: Iterator
    whole: bool = False


class Job:
    """Parameter servers, the slot map, one move at a time, and trainers whose slot maps may be old."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.map = SlotMap(version=1, owners=(0,) * SLOTS)
        self.stores = [store_of(index) for index in range(MEMBERS)]
        self.stores[0].slots = self.map
        self.move: Move | None = None
        self.waiting = list(range(TASKS))
        self.trainers: list[Trainer] = []
        self.seen: Counter[str] = Counter()

    def slots_of(self, index: int) -> set[int]:
        return {slot for slot, owner in enumerate(self.map.owners) if owner == index}

    def run(self) -> Job:
        for _ in range(20_000):
            while len(self.trainers) < TRAINERS and self.waiting:
                self.trainers.append(Trainer(self.waiting.pop(0), self.map, due=set(self.map.owners)))
            if not self.trainers:
                break
            if self.rng.random() < 0.4:
                self.go_on_moving()
            else:
                self.train(self.rng.choice(self.trainers))
        else:
            pytest.fail(
                f"it is never over: {self.trainers}, {self.move}, {[store.ledger for store in self.stores]}"
            )
        if self.move is not None:
            self.end(drop=True)
        self.check()
        return self

    def train(self, trainer: Trainer) -> None:
        if not trainer.due:
            trainer.minibatch, trainer.by, trainer.due = trainer.minibatch + 1, self.map, set(self.map.owners)
            if trainer.minibatch == MINIBATCHES:
                self.trainers.remove(trainer)
            return
        if self.rng.random() < 0.02:  # another one gets the task
            trainer.attempt, trainer.by, trainer.due = trainer.attempt + 1, self.map, set(self.map.owners)
            answers = [self.stores[index].ledger.next_of(0, trainer.task) for index in set(self.map.owners)]
            trainer.minibatch = min(MINIBATCHES if answer.closed else answer.next for answer in answers)
            trainer.due = trainer.due if trainer.minibatch < MINIBATCHES else set()
            self.seen["another"] += 1
            if trainer.minibatch == MINIBATCHES:
                self.trainers.remove(trainer)
            return
        index = self.rng.choice(sorted(trainer.due))
        owners = np.array(trainer.by.owners)
        keys = [
            some[owners[slots_of(some, spec.seed, SLOTS)] == index]
            for some, spec in zip(keys_of(trainer.task, trainer.minibatch), SPECS, strict=True)
        ]
        found = push(
            self.stores[index], index, keys, trainer.by, trainer.task, trainer.minibatch, trainer.attempt
        )
        self.seen[found] += 1
        if found in (Verdict.APPLIED, Verdict.DUPLICATE):
            if self.rng.random() < 0.9:  # else the answer is lost
                trainer.due.discard(index)
        elif found not in (Verdict.MOVING, Verdict.WRONG_OWNER):
            pytest.fail(f"minibatch {trainer.minibatch} of task {trainer.task} at {index}: {found}")
        elif trainer.by != self.map:
            pairs = zip(trainer.by.owners, self.map.owners, strict=True)
            changed = {owner for was, now in pairs if was != now for owner in (was, now)} | {index}
            trainer.due = (trainer.due - changed) | (changed & set(self.map.owners))
            trainer.by = self.map

    def go_on_moving(self) -> None:
        move = self.move
        if move is None:
            self.begin()
        elif (part := next(move.early, None)) is not None:
            carry(self.rng, move.arriving, [part])
        elif not move.leaving.frozen:
            move.leaving.freeze()
        elif not move.whole:
            carry(self.rng, move.arriving, move.leaving.rest())
            tables, version = move.leaving.described_tables()
            move.arriving.rows.complete(tables, version, joins=not self.slots_of(move.target))
            history = self.stores[move.source].history.handed()
            move.arriving.complete(move.leaving.described(), history, move.leaving.ledger())
            move.whole = True
        elif self.rng.random() < 0.2:
            self.end(drop=self.rng.random() < 0.15)

    def begin(self) -> None:
        source, target = self.rng.sample(range(MEMBERS), 2)
        own = sorted(self.slots_of(source))
        if not own:
            return
        slots = frozenset(self.rng.sample(own, self.rng.randint(1, max(1, len(own) * 2 // 3))))
        into = self.stores[target]
        leaving = LeavingBlocks(self.stores[source], (), LeavingOnArrival(self.stores[source].rows, slots))
        arriving = ArrivingBlocks({}, into.pool, ArrivingOnArrival(into.rows, slots), slots)
        leaving.begin()
        self.move = Move(source, target, slots, leaving, arriving, leaving.early())

    def end(self, *, drop: bool) -> None:
        move, self.move = self.move, None
        if drop:
            move.leaving.thaw()
            move.arriving.release()
            return
        had = self.slots_of(move.target)
        owners = [move.target if slot in move.slots else owner for slot, owner in enumerate(self.map.owners)]
        self.map = SlotMap(version=self.map.version + 1, owners=tuple(owners))
        source, target = self.stores[move.source], self.stores[move.target]
        source.slots = target.slots = self.map
        forget(source, (), move.slots, self.slots_of(move.source))
        move.leaving.release()
        if not had:
            target.rows.begin_at(move.arriving.rows.version)
        adopt(target, [move.arriving], had)
        source.rows.since = target.rows.since = self.map.version
        self.seen["moved"] += 1
        self.seen["uneven"] += len(target.ledger.slots) > 1

    def check(self) -> None:
        """Each row has been stepped once for each minibatch that has its id, and the ledgers say so."""
        minibatches = [keys_of(task, number) for task in range(TASKS) for number in range(MINIBATCHES)]
        for number, spec in enumerate(SPECS):
            every = np.arange(IDS)
            times = np.zeros(IDS)
            for keys in minibatches:
                times[keys[number]] += 1
            expected = -np.maximum(times - NOT_ADMITTED[number], 0)
            owners = np.array(self.map.owners)[slots_of(every, spec.seed, SLOTS)]
            for index, store in enumerate(self.stores):
                mine = every[owners == index]
                ids = [mine if n == number else every[:0] for n in range(len(SPECS))]
                found = np.frombuffer(store.rows.lookup(None, ids), np.float32).reshape(-1, spec.dim)[:, 0]
                assert found.tolist() == expected[mine].tolist(), (spec.name, index)
        for index in set(self.map.owners):
            (counts,) = self.stores[index].ledger.counts()
            whole = TASKS * MINIBATCHES
            assert (counts.applied_lowest, counts.applied_highest, counts.tasks_open) == (whole, whole, 0)
        assert not any(table.leaving for store in self.stores for table in store.rows.tables)


@pytest.mark.parametrize(
    "seeds",
    [range(2), pytest.param(range(2, 200), marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=str,
)
def test_each_slot_has_each_minibatch_once_wherever_it_is(seeds):
    seen = sum((Job(seed).run().seen for seed in seeds), Counter())
    assert seen["moved"] > 10 * len(seeds)
    assert seen[Verdict.MOVING] > 10 * len(seeds)
    assert seen["uneven"] > len(seeds)  # its slots had had other minibatches than those of their new owner
    assert seen["another"] > len(seeds)


# -------------------------------------------------------------------- ablations


def alike(rows):
    """Slots have had what the first of them have had, wherever they come from."""
    return [(*rows[0][:2], sum(bits for _, _, bits in rows))] if rows else []


def taken_frozen(self: ArrivedRows, steps: Callable = ArrivedRows.steps) -> Iterator[None]:
    kept, self.rows.freeze_at = self.rows.freeze_at, None
    try:
        return (yield from steps(self))
    finally:
        self.rows.freeze_at = kept


def without_sketches() -> Callable:
    return replaced(LeavingRows, "_sketches", lambda *_: iter(()))


def without_removals() -> Callable:
    whole = LeavingOnArrival.rest
    return replaced(
        LeavingOnArrival, "rest", lambda self: (p for p in whole(self) if p[0].name != RowPart.NOW)
    )


ABLATIONS = {
    "ledger of each group of slots": lambda: replaced(ledger, "_alike", alike),
    "freeze": lambda: replaced(ArrivedRows, "steps", taken_frozen),
    "what changes while rows are sent": lambda: replaced(ChangedIds, "ids", lambda _: np.empty(0, np.int64)),
    "rows as they are now": without_removals,
    "sketches": without_sketches,
    "slot map of pushes": lambda: replaced(TableRows, "are_by", lambda *_: True),
}


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_without_it_minibatches_are_lost_or_counted_twice(name):
    for seed in range(12):
        with ABLATIONS[name](), suppress(AssertionError, BadFrame, pytest.fail.Exception):
            Job(seed).run()
            continue
        return
    pytest.fail(f"nothing was wrong without: {name}")


# -------------------------------------------------------------------- what rows bring along

ONE = TableSpec(name="one", dim=1, seed=5, optimizer=SGD, init=ZEROS, max_rows=SLOTS, evict_after_steps=100)
OF_ONE = LAYOUT.model_copy(update={"tables": (ONE,)})
EVERY = np.arange(400)
MINE = EVERY[slots_of(EVERY, ONE.seed, SLOTS) == 3]  # one slot has room for one row
MOVED = frozenset((3,))


def step(store: AsyncStore, *keys: int) -> None:
    deque(store.rows.apply([np.array(sorted(keys), np.int64)], [np.ones((len(keys), 1), np.float32)], 2), 0)


def ages(store: AsyncStore) -> dict[int, int]:
    (table,) = store.rows.tables
    rows = [table.read_slot(slot) for slot in table.slots()]
    return {
        key: age
        for part in rows
        for key, age in zip(part.ids.tolist(), ages_of(part.words, table.version).tolist(), strict=True)
    }


def moved(
    source: AsyncStore,
    target: AsyncStore,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    joins: bool = False,
) -> None:
    leaving = LeavingBlocks(source, (), LeavingOnArrival(source.rows, MOVED))
    arriving = ArrivingBlocks({}, target.pool, ArrivingOnArrival(target.rows, MOVED), MOVED)
    leaving.begin()
    for part, payload in leaving.early():
        arriving.take(part, payload)
    meanwhile()
    leaving.freeze()
    for part, payload in leaving.rest():
        arriving.take(part, payload)
    tables, version = leaving.described_tables()
    arriving.rows.complete(tables, version, joins=joins)
    arriving.complete((), source.history.handed(), leaving.ledger())
    forget(source, (), MOVED)
    source.rows.give_back_at_once()
    leaving.release()
    if joins:
        target.rows.begin_at(version)
    adopt(target, [arriving])


def test_a_row_that_has_left_while_rows_were_sent_has_left_at_its_new_owner_too():
    source, target = store_of(0, OF_ONE), store_of(1, OF_ONE)
    first, second = MINE[:2].tolist()
    step(source, first)
    moved(source, target, lambda: step(source, second))
    assert ages(target) == {second: 0}
    assert ages(source) == {}


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_rows_are_as_old_as_they_were_though_their_new_owner_counts_for_itself(steps):
    source, target = store_of(0, OF_ONE), store_of(1, OF_ONE)
    key, other = int(MINE[0]), int(EVERY[slots_of(EVERY, ONE.seed, SLOTS) == 4][0])
    step(source, key)
    for _ in range(5):
        step(source)
    step(target, other)
    for _ in range(steps):
        step(target)
    moved(source, target)
    # no row is older than the count of its server
    assert ages(target) == {key: min(5, steps + 1), other: steps}
    assert target.rows.tables[0].updates == max(6, steps + 1)


def test_a_checkpoint_that_is_being_written_has_no_row_of_a_slot_that_left_and_came_back():
    source, target = store_of(0, OF_ONE), store_of(1, OF_ONE)
    first, second = MINE[:2].tolist()
    step(source, first)
    (snapshot,) = source.rows.copies()
    moved(source, target)
    step(target, second)
    for _ in range(3):
        step(target)
    moved(target, source)
    assert ages(source) == {second: 1}  # its stamp is not above that of the checkpoint
    assert [snapshot.read(group).ids.tolist() for group in snapshot.groups()] == [[first]]
    snapshot.close()


def test_the_first_rows_of_a_parameter_server_bring_its_version():
    source, target = store_of(0, OF_ONE), store_of(1, OF_ONE)
    step(source, int(MINE[0]))
    step(source)
    moved(source, target, joins=True)
    assert (target.rows.version, ages(target)) == (2, {int(MINE[0]): 1})


def test_a_group_whose_ledger_lacks_slots_is_refused():
    source, target = store_of(0, OF_ONE), store_of(1, OF_ONE)
    arriving = ArrivingBlocks({}, target.pool, ArrivingOnArrival(target.rows, MOVED), MOVED)
    with pytest.raises(BadFrame, match=r"the ledger has rows of slots 0x10 \(bits\): the group is of 0x8"):
        arriving.complete((), source.history.handed(), source.ledger.part((), 1 << 4))
    assert not arriving.whole


def test_ids_that_change_again_and_again_are_remembered_once():
    store = store_of(0, OF_ONE)
    changed = ChangedIds(store.rows.tables[0], np.ones(SLOTS, np.bool_))
    for _ in range(50):
        step(store, *MINE[:1].tolist())
    assert changed.ids().tolist() == MINE[:1].tolist()
    changed.close()
    step(store, int(MINE[1]))
    assert changed.ids().tolist() == MINE[:1].tolist()
