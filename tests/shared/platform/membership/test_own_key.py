"""A member's own key is kept equal to the record that it wants, on virtual time and a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme_shared.platform.etcd import Etcd, LeaseLost
from trireme_shared.platform.etcd.operations import TXN
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import PserverMember

KEY, TTL_S = "/members/a", 5.0


def virtual(test):
    @functools.wraps(test)
    def wrapped():
        rng = random.Random(7)
        run_virtual(VirtualLoop(rng), test(SimulatedEtcd()), rng)

    del wrapped.__wrapped__
    return wrapped


@asynccontextmanager
async def held(world: SimulatedEtcd):
    """A claimed key that is held, and a reader of what etcd has."""
    etcd, observer = Etcd(world.transport("a")), Etcd(world.transport("observer"))
    own = OwnKey(etcd, PserverMember(index=0, url="", incarnation="a", host="h", pid=1))
    assert await own.claim(KEY, TTL_S)

    async def written() -> PserverMember:
        found = await observer.get(KEY)
        return PserverMember.model_validate_json(found.value)

    async with asyncio.TaskGroup() as group:
        holding = group.create_task(own.hold())
        yield own, written
        holding.cancel()


@virtual
async def test_what_is_set_is_written(world):
    async with held(world) as (own, written):
        own.set(copied="u1")
        own.set(trouble="full")
        await asyncio.sleep(1.0)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble) == ("u1", "full")


@virtual
async def test_what_is_set_while_etcd_is_away_is_written_once_it_is_back_with_the_new_lease(world):
    async with held(world) as (own, written):
        before = own.record.lease
        world.stop()
        own.set(copied="u1")
        await asyncio.sleep(4 * TTL_S)
        own.set(trouble="full")
        world.start()
        await asyncio.sleep(TTL_S)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble, own.record.lease == before) == ("u1", "full", False)


@virtual
async def test_a_write_that_failed_is_not_made_later(world):
    async with held(world) as (own, written):
        world.stop()
        with pytest.raises(PeerError):
            await own.write(copied="u1")
        world.start()
        own.set(trouble="full")
        await asyncio.sleep(3 * TTL_S)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble) == ("", "full")


@virtual
async def test_a_write_whose_answer_is_lost_is_said_to_have_failed(world):
    async with held(world) as (own, _):
        world.lose_answer(client="a", method=TXN)
        with pytest.raises(PeerError):
            await own.write(copied="u1")
        assert await own.write(copied="u1")


@virtual
async def test_a_write_while_the_lease_is_over_fails_and_is_not_made_later(world):
    """Whoever asked for it may have gone on since."""
    async with held(world) as (own, written):
        world.cut("a")
        await asyncio.sleep(2 * TTL_S)
        with pytest.raises((LeaseLost, PeerError)):
            async with asyncio.timeout(TTL_S / 2):
                world.mend("a")
                await own.write(copied="u1")
        await asyncio.sleep(TTL_S)
        assert await written() == own.record
        assert own.record.copied == ""


@virtual
async def test_a_key_that_was_deleted_is_lost_and_not_written_again(world):
    etcd = Etcd(world.transport("other"))
    async with held(world) as (own, _):
        await etcd.delete(KEY)
        own.set(copied="u1")
        assert not await own.write(copied="u2")
        await asyncio.sleep(3 * TTL_S)
        assert await etcd.get(KEY) is None
        assert not own.lease.alive, "its holder ends, and does not wait for ever to be seen"


async def is_not_lost(own: OwnKey, written, before: PserverMember) -> None:
    """It waited in doubt, and has its key again, with another lease."""
    assert own.in_doubt
    async with asyncio.timeout(TTL_S):
        await own.certain()
    assert await written() == own.record
    assert own.record.lease != before.lease
    assert (await own.write(trouble="full"), (await written()).trouble) == (True, "full")


@virtual
async def test_a_key_whose_lease_ran_out_while_etcd_was_silent_is_created_again_with_what_was_set(world):
    async with held(world) as (own, written):
        before, created = own.record, own.held
        world.freeze()
        await asyncio.sleep(2 * TTL_S)
        own.set(copied="u1")
        await asyncio.sleep(10 * TTL_S)
        assert own.in_doubt
        world.thaw()
        await is_not_lost(own, written, before)
        assert (await written()).copied == "u1"
        assert own.held != created


@virtual
async def test_a_holder_that_was_cut_off_alone_takes_its_place_again_if_nobody_else_has(world):
    async with held(world) as (own, written):
        before = own.record
        world.cut("a")
        await asyncio.sleep(3 * TTL_S)
        assert await Etcd(world.transport("b")).get(KEY) is None, "its lease ran out"
        world.mend("a")
        await is_not_lost(own, written, before)


@virtual
async def test_a_place_that_another_process_took_meanwhile_is_lost(world):
    etcd = Etcd(world.transport("b"))
    other = OwnKey(etcd, PserverMember(index=0, url="", incarnation="b", host="h", pid=1))
    own = OwnKey(Etcd(world.transport("a")), PserverMember(index=0, url="", incarnation="a", host="h", pid=1))
    assert await own.claim(KEY, TTL_S)
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(own.hold())
        world.cut("a")
        await asyncio.sleep(3 * TTL_S)
        assert await other.claim(KEY, 100.0)
        assert not holding.done()
        world.mend("a")
        async with asyncio.timeout(TTL_S):
            await holding
    assert b'"b"' in (await etcd.get(KEY)).value
    assert not await own.write(trouble="full")


@virtual
async def test_a_key_created_again_by_a_request_whose_answer_was_lost_is_recognised(world):
    async with held(world) as (own, written):
        before = own.record
        world.freeze()
        await asyncio.sleep(3 * TTL_S)
        world.lose_answer(client="a", method=TXN)
        world.thaw()
        await is_not_lost(own, written, before)


@virtual
async def test_an_etcd_that_is_down_leaves_no_doubt_and_one_that_falls_silent_after_it_does(world):
    async with held(world) as (own, _):
        world.stop()
        await asyncio.sleep(3 * TTL_S)
        assert not own.in_doubt
        world.start()
        world.freeze()
        await asyncio.sleep(TTL_S)
        assert own.in_doubt
        world.thaw()
        async with asyncio.timeout(TTL_S):
            await own.certain()


OUTAGES = {
    "cut off until its lease ran out": (lambda world: world.cut("a"), lambda world: world.mend("a")),
    "etcd restarted, its lease is still there": (lambda world: world.stop(), lambda world: world.start()),
}


@pytest.mark.parametrize("outage", list(OUTAGES))
def test_what_is_set_while_the_lease_is_replaced_is_written_under_the_new_one(outage):
    """Reads and writes of both cross in any order. A read that was answered before the key was created again
    said that it was lost: nothing was written any more. A write under the old lease took the key away with
    that lease."""
    begins, ends = OUTAGES[outage]

    async def play(world: SimulatedEtcd, rng: random.Random) -> bool:
        async with held(world) as (own, written):
            begins(world)
            await asyncio.sleep(3 * TTL_S)
            ends(world)
            await asyncio.sleep(rng.uniform(0.0, 0.7))
            own.set(copied="u1")
            await asyncio.sleep(4 * TTL_S)
            return own.record.copied == "u1" and await written() == own.record

    for seed in range(300):
        rng = random.Random(seed)
        world = SimulatedEtcd(rng=rng, delay_s=(0.0, 0.05))
        assert run_virtual(VirtualLoop(rng), play(world, rng), rng), seed


@virtual
async def test_a_claim_that_is_cancelled_after_etcd_has_written_it_is_given_up_by_the_release(world):
    etcd = Etcd(world.transport("a"))
    own, txn = OwnKey(etcd, PserverMember(index=0, url="", incarnation="a", host="h", pid=1)), etcd.txn

    async def unanswered(*arguments, **settings):
        await txn(*arguments, **settings)
        await asyncio.Event().wait()

    etcd.txn = unanswered
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await own.claim(KEY, TTL_S)
    assert await etcd.get(KEY) is not None
    await own.release()
    assert await etcd.get(KEY) is None
