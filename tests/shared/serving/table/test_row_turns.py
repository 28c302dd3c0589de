"""Rows of asynchronous pushes are stepped some at a time: whatever comes in between, each push counts whole
or not at all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from pserver_service.checkpoints import copies
from tests.equipment.cluster.lookups import lookup
from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import async_header, initialised, stream
from tests.shared.serving.data_plane.servers import server
from tests.shared.serving.table.tables import LAYOUT, NONE, ids, pushed_rows, values_in, wanted, whole_blocks
from trireme_shared.protocol.errors import InvalidArgument, NotReady, TriremeError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job import Torn
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import LedgerQuery, Verdict
from trireme_shared.serving.core.table import rows as table_rows
from trireme_shared.serving.data_plane import row_turns
from trireme_shared.serving.data_plane.row_turns import RowTurns
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.table import Table

__all__ = ["server"]
over_sockets = pytest.mark.parametrize("server", ["tcp", "unix"], indirect=True)
MANY, FEW = np.arange(20_000), ids(3, 9)
LAST = MANY[-1:]


class Place:
    """The key of a parameter server in etcd; `torn`: what it told of steps that cannot be finished."""

    in_doubt = False

    def __init__(self) -> None:
        self.torn: list[Torn] = []

    def set(self, torn: Torn) -> None:
        self.torn.append(torn)


@asynccontextmanager
async def serving(turn_s: float = 0.0):
    """A parameter server of an asynchronous job that does one portion in a turn."""
    pserver, _ = await initialised(
        LAYOUT, Mode.ASYNC, 1, ports=ServerPorts(row_steps=partial(RowTurns, turn_s=turn_s))
    )
    yield pserver


async def push(pserver, start: int, *keys: np.ndarray, **fields):
    """Minibatch `start` of task 0; how it was taken."""
    header = async_header(0, start, start + 1, 8, **fields)
    answer = await pserver.push(header, stream(*whole_blocks((0, 1)), pushed_rows(0, *keys)))
    return answer.refused[0].code if answer.refused else "APPLIED" if answer.applied else "DUPLICATE"


async def value(pserver, key: np.ndarray) -> float:
    """Of the first number of the row of an item: 0.5, less by 1 for each push."""
    found = await lookup(pserver, *wanted(None, key, NONE, wait_s=5.0))
    return values_in(found, 1, 0)[0][0][0]


async def next_of(pserver) -> int:
    return (await pserver.ledger(LedgerQuery(epoch=0, task_id="0"))).next


async def begun(pserver) -> None:
    """A push is half applied."""
    async with asyncio.timeout(5):
        while not pserver.store.rows.changing:
            await asyncio.sleep(0)


async def test_between_two_portions_the_loop_has_its_turn_and_nothing_is_read_or_counted():
    async with serving() as pserver:
        pushing = asyncio.ensure_future(push(pserver, 0, MANY, ids(7)))
        await begun(pserver)
        looking, turns = asyncio.ensure_future(value(pserver, LAST)), 0
        while pserver.store.rows.changing:
            assert (pushing.done(), looking.done(), await next_of(pserver)) == (False, False, 0)
            turns += 1
            await asyncio.sleep(0)
        assert turns > 10
        assert (await pushing, await looking, await next_of(pserver)) == ("APPLIED", -0.5, 1)


async def test_pushes_are_stepped_one_after_the_other_and_lookups_are_answered_between_them():
    async with serving() as pserver:
        pushing = [asyncio.ensure_future(push(pserver, start, MANY, NONE)) for start in range(3)]
        seen = set()
        while not all(each.done() for each in pushing):
            seen.add(await value(pserver, LAST))
            await asyncio.sleep(0)
        assert [each.result() for each in pushing] == ["APPLIED"] * 3
        assert seen >= {-0.5, -1.5}
        assert (await value(pserver, LAST), await next_of(pserver)) == (-2.5, 3)


async def test_a_push_that_is_given_up_in_the_middle_is_whole_and_counts_once():
    async with serving() as pserver:
        pushing = asyncio.ensure_future(push(pserver, 0, MANY, NONE))
        await begun(pserver)
        pushing.cancel()
        again = asyncio.ensure_future(push(pserver, 0, MANY, NONE))
        assert await again == "DUPLICATE"
        assert (await value(pserver, LAST), await next_of(pserver)) == (-0.5, 1)


async def copied(pserver, pushing):
    """The next minibatch by the ledger, and the values of rows, as a copy has them that is made now and read
    when these pushes are whole."""
    made = await copies.begin(
        pserver, pserver.store, lambda: pserver.store.begin_copy(StepRecord(version=1, positions=()))
    )
    try:
        assert await asyncio.gather(*pushing) == ["APPLIED"] * len(pushing)
        (task,) = made.ledger.epochs[0].open.values()
        content = [rows.read(group).content[:, 0] for rows in made.tables for group in rows.groups()]
        return set(task.next[len(pserver.store.blocks) :]), set(np.concatenate(content).tolist())
    finally:
        made.release()


async def test_a_copy_for_a_checkpoint_has_pushes_whole_with_their_ledger():
    async with serving() as pserver:
        assert await push(pserver, 0, MANY, MANY) == "APPLIED"
        pushing = [asyncio.ensure_future(push(pserver, start, MANY, MANY)) for start in (1, 2)]
        await begun(pserver)
        assert await copied(pserver, pushing) == ({2}, {-1.5})


async def test_without_waiting_for_the_end_of_a_push_a_copy_would_have_half_of_it():
    async with serving() as pserver:
        await push(pserver, 0, MANY, MANY)
        pushing, rows = asyncio.ensure_future(push(pserver, 1, MANY, MANY)), pserver.store.rows
        await begun(pserver)
        while rows.tables[1].version == 1:
            await asyncio.sleep(0)
        pserver.row_steps.between_pushes = lambda call: call()
        rows.changing = False  # which would be noticed
        assert await copied(pserver, [pushing]) == ({1}, {-0.5, -1.5})


async def test_slots_that_come_or_go_find_the_push_whole():
    async with serving() as pserver:
        pushing = asyncio.ensure_future(push(pserver, 0, MANY, NONE))
        await begun(pserver)
        pserver.row_steps.finish()
        assert not pserver.store.rows.stepping
        assert await next_of(pserver) == 1
        assert (await pushing, await value(pserver, LAST)) == ("APPLIED", -0.5)
        pserver.row_steps.finish()


async def test_a_roll_back_forgets_the_push_that_is_being_stepped_and_those_that_wait():
    async with serving() as pserver:
        before = pserver.store.rows.copies()
        pushing = [asyncio.ensure_future(push(pserver, start, MANY, NONE)) for start in range(2)]
        await begun(pserver)
        asked = asyncio.ensure_future(copies.begin(pserver, pserver.store, lambda: None))
        await asyncio.sleep(0)
        store = pserver.store
        pserver.drop(2)
        assert [await each for each in pushing] == [Verdict.STALE_GENERATION] * 2
        assert await asked is None
        assert store.ledger.next_of(0, 0).next == 0
        assert not any(
            len(copied.read(group)) for copied in before for group in copied.groups()
        )  # nor does a reader wait


async def test_a_push_whose_generation_is_over_when_its_turn_comes_is_refused():
    async with serving() as pserver:
        first, second = (asyncio.ensure_future(push(pserver, start, MANY, NONE)) for start in range(2))
        await begun(pserver)
        assert await copies.copy(pserver, StepRecord(version=1, positions=()), 5, lambda _: True)
        assert (await first, await second) == ("APPLIED", Verdict.STALE_GENERATION)
        assert await next_of(pserver) == 1


async def test_pushes_wait_while_a_snapshot_keeps_too_much_and_the_rest_goes_on(monkeypatch):
    async with serving() as pserver:
        rows = pserver.store.rows
        rows.kept.most_bytes = 40
        await push(pserver, 0, FEW, NONE)
        snapshots = rows.copies()
        assert await push(pserver, 1, FEW, NONE) == "APPLIED"
        waiting = asyncio.ensure_future(push(pserver, 2, FEW, NONE))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await value(pserver, FEW[:1]) == -1.5
        for each in snapshots:
            for group in each.groups():
                assert set(each.read(group).content[:, 0].tolist()) == {-0.5}
            each.close()
        assert (await waiting, await value(pserver, FEW[:1])) == ("APPLIED", -2.5)
        assert rows.kept.waited_s >= 0.04
        monkeypatch.setattr(table_rows, "LIMIT_S", 0.1)
        stuck = rows.copies()
        assert [await push(pserver, start, FEW, NONE) for start in (3, 4)] == ["APPLIED"] * 2
        with pytest.raises(InvalidArgument, match="none were written"):
            stuck[0].read(next(stuck[0].groups()))


async def test_more_bytes_than_may_wait_are_to_be_pushed_again(monkeypatch):
    monkeypatch.setattr(row_turns, "WAITING_BYTES", 1000)
    async with serving() as pserver:
        large = asyncio.ensure_future(push(pserver, 0, MANY, NONE))
        await begun(pserver)
        waits = asyncio.ensure_future(push(pserver, 1, MANY, NONE))
        await asyncio.sleep(0)
        with pytest.raises(
            NotReady, match="1 pushes with 320000 bytes of rows wait at pserver-0: push again"
        ):
            await push(pserver, 2, MANY, NONE)
        assert (await large, await waits) == ("APPLIED", "APPLIED")
        assert await push(pserver, 2, MANY, NONE) == "APPLIED"


async def test_a_push_that_cannot_be_stepped_is_refused_alone_before_anything_changes():
    def full(*_):
        raise InvalidArgument("no room")
        yield

    async with serving() as pserver:
        with (
            replaced(Table, "prepare", full),
            pytest.raises(InvalidArgument, match="no room"),
        ):
            await push(pserver, 0, FEW, NONE)
        assert not pserver.store.rows.stepping
        assert (await push(pserver, 0, FEW, NONE), await value(pserver, FEW[:1])) == ("APPLIED", -0.5)


async def test_a_bug_in_the_middle_of_a_push_sends_the_job_back_to_a_checkpoint():
    def broken(*_):
        raise RuntimeError("a bug")

    place = Place()
    async with serving() as pserver:
        pserver.own_place = place
        with replaced(row_loops, "update", broken), pytest.raises(NotReady, match="could not step"):
            await push(pserver, 0, FEW, NONE)
        assert "a push to its embedding tables failed: RuntimeError('a bug')" in place.torn[0].cause
        assert await next_of(pserver) == 0


@over_sockets
async def test_a_stream_that_breaks_in_the_middle_of_a_push_leaves_it_whole(server, monkeypatch):
    monkeypatch.setattr(row_turns, "TURN_S", 0.0)
    await server.initialise(LAYOUT, Mode.ASYNC, 1)
    pushing = asyncio.ensure_future(push(server.client, 0, MANY, NONE))
    await begun(server.pserver)
    await server.client.close()
    with pytest.raises(TriremeError):
        await pushing
    assert server.pserver.store.rows.stepping
    async with server.connect(server.member, "boat", stall_s=20) as other:
        assert await push(other, 0, MANY, NONE) == "DUPLICATE"
    assert await value(server.pserver, LAST) == -0.5


@over_sockets
async def test_a_push_that_is_refused_in_its_turn_leaves_the_stream_to_the_others(server, monkeypatch):
    monkeypatch.setattr(row_turns, "WAITING_BYTES", 1000)
    monkeypatch.setattr(row_turns, "TURN_S", 0.0)
    await server.initialise(LAYOUT, Mode.ASYNC, 1)
    pushing = [asyncio.ensure_future(push(server.client, 0, MANY, NONE))]
    await begun(server.pserver)
    turns = server.pserver.row_steps
    pushing += [asyncio.ensure_future(push(server.client, start, MANY, NONE)) for start in (1, 2)]
    async with asyncio.timeout(5):
        with pytest.raises(NotReady, match="1 pushes with 320000 bytes"):
            await pushing[2]
    assert await asyncio.gather(*pushing[:2]) == ["APPLIED"] * 2
    assert repr(turns) == "<RowTurns: 0 pushes wait, 0 bytes>"
    assert await push(server.client, 2, MANY, NONE) == "APPLIED"


async def test_rows_freeze_when_the_push_that_is_being_stepped_is_whole():
    async with serving() as pserver:
        rows = pserver.store.rows
        first, second = (asyncio.ensure_future(push(pserver, start, MANY, NONE)) for start in range(2))
        await begun(pserver)
        rows.freeze_at = rows.version
        assert not rows.frozen
        assert (await first, await second, rows.frozen) == ("APPLIED", Verdict.MOVING, True)
        assert await push(pserver, 0, MANY, NONE) == "DUPLICATE"


async def test_rows_of_slots_that_left_are_given_back_in_turns_and_a_snapshot_that_is_open_has_them():
    """All at once held up lookups for as long as there were rows; who reads the snapshot waits until it has
    them."""
    async with serving() as pserver:
        assert await push(pserver, 0, MANY, ids(7)) == "APPLIED"
        rows = pserver.store.rows
        [snapshot, *_] = rows.copies()
        gone = np.arange(rows.slot_count // 2)
        expected = snapshot.rows
        rows.drop(gone)
        pserver.row_steps.give_back(rows)
        reading = asyncio.ensure_future(
            asyncio.to_thread(lambda: sum(len(snapshot.read(group)) for group in snapshot.groups()))
        )
        turns = 0
        while rows.has_dropped:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 3
        assert await asyncio.wait_for(reading, 10) == expected
        assert rows.tables[0].rows < expected
        for each in rows.snapshots:
            each.close()


async def test_a_step_that_comes_first_gives_back_rows_of_slots_that_left():
    async with serving(10.0) as pserver:
        assert await push(pserver, 0, MANY, ids(7)) == "APPLIED"
        rows = pserver.store.rows
        copies = rows.copies()
        rows.drop(np.arange(rows.slot_count // 2))
        kept = FEW[slots_of(FEW, rows.tables[0].spec.seed, rows.slot_count) >= rows.slot_count // 2]
        assert await asyncio.wait_for(push(pserver, 1, kept, NONE), 10) == "APPLIED"
        assert not rows.has_dropped
        for each in copies:
            each.close()
