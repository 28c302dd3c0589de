"""The place of a pserver among its peers, on virtual time and a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import pytest

from pserver_service.context import OwnIndex, own_number
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from tests.pserver_service.jobs import JOB
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.operations import TXN
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, PserverMember

KEYS = Keys(JOB)
TTL_S = 5.0
SPEC = JobSpec(
    job=JOB, script="s.py", dataset={"kind": "csv", "urls": ["x.csv"]}, storage="/tmp/x", lease_ttl_s=TTL_S
)


def virtual(test):
    """Run an async test on a virtual loop."""

    @functools.wraps(test)
    def wrapped(*args):
        rng = random.Random(7)
        run_virtual(VirtualLoop(rng), test(SimulatedEtcd(), *args), rng)

    del wrapped.__wrapped__
    return wrapped


@asynccontextmanager
async def candidate(world: SimulatedEtcd, name: str, own: int | None = None, fits=None):
    """A pserver's own index with its directory running beside it."""
    etcd = Etcd(world.transport(name))
    directory = Directory(etcd, KEYS)
    member = PserverMember(index=-1, url=f"http://{name}:1", incarnation=name, host="h", pid=1)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run())
        index = OwnIndex(etcd, directory, member, own, fits)
        directory.observers.append(index.follow)
        yield index
        following.cancel()
    await etcd.close()


async def job(world: SimulatedEtcd, desired: int = 2) -> Etcd:
    """What a master writes first."""
    etcd = Etcd(world.transport("master"))
    await etcd.put(KEYS.spec, SPEC.to_bytes())
    await etcd.put(KEYS.pservers_desired, str(desired).encode())
    return etcd


async def members(etcd: Etcd) -> dict[int, str]:
    found = await etcd.range(KEYS.pservers, prefix=True)
    parsed = [PserverMember.model_validate_json(kv.value) for kv in found.kvs]
    assert all(kv.lease == member.lease != 0 for kv, member in zip(found.kvs, parsed, strict=True))
    return {member.index: member.incarnation for member in parsed}


@virtual
async def test_a_process_takes_the_index_it_is_called_after_if_it_is_free(world):
    await job(world, desired=3)
    async with (
        candidate(world, "a", 1) as one,
        candidate(world, "b", 2) as two,
        candidate(world, "c", 1) as late,
    ):
        assert [await each.claim_index(10) for each in (one, two, late)] == [1, 2, 0]


def test_a_process_is_called_after_the_number_at_the_end_of_its_name():
    assert [own_number(name) for name in ("pserver-1", "pserver", "ps3", "host-12")] == [1, None, None, 12]


@virtual
async def test_the_lowest_free_index_is_claimed(world):
    etcd = await job(world, 3)
    async with candidate(world, "a") as one, candidate(world, "b") as two, candidate(world, "c") as three:
        assert [await each.claim_index(10) for each in (one, two, three)] == [0, 1, 2]
        assert await members(etcd) == {0: "a", 1: "b", 2: "c"}
        await two.release()
        assert await members(etcd) == {0: "a", 2: "c"}
        async with candidate(world, "d") as four:
            assert await four.claim_index(10) == 1


@virtual
async def test_pservers_that_start_at_once_get_different_indexes(world):
    world.delay_s = (0.001, 0.02)
    etcd = await job(world, 4)
    async with (
        candidate(world, "a") as a,
        candidate(world, "b") as b,
        candidate(world, "c") as c,
        candidate(world, "d") as d,
    ):
        assert sorted(await asyncio.gather(*(each.claim_index(60) for each in (a, b, c, d)))) == [0, 1, 2, 3]
    assert len(await members(etcd)) == 4


@virtual
async def test_a_claim_waits_for_a_job_and_says_so(world):
    async with candidate(world, "a") as one:
        with pytest.raises(DeadlineExceeded, match="waited 3 s for job/spec and ps_desired"):
            await one.claim_index(3)
        claim = asyncio.ensure_future(one.claim_index(60))
        await asyncio.sleep(10)
        await job(world)
        assert await claim == 0


@virtual
async def test_a_spare_waits_for_a_place_and_takes_that_of_a_dead_one(world):
    etcd = await job(world, 1)
    async with candidate(world, "dead") as dead:
        await dead.claim_index(10)  # and never renews
    async with candidate(world, "b") as spare:
        with pytest.raises(DeadlineExceeded, match="for a free place among 1 pservers"):
            await spare.claim_index(1)
        assert await spare.claim_index(3 * TTL_S) == 0
        assert await members(etcd) == {0: "b"}


@virtual
async def test_an_index_whose_key_says_something_else_now_is_lost(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        holding = await one.claim_index(10)
        await etcd.put(KEYS.pserver(holding), b"not ours", one.lease.id)
        assert await one.write(draining=True) is False


@virtual
async def test_a_claim_whose_answer_is_lost_is_read_back(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        world.lose_answer(client="a", method=TXN)
        assert await one.claim_index(30) == 0
        holding = asyncio.ensure_future(one.hold())
        await asyncio.sleep(5 * TTL_S)
        assert not holding.done()
        assert await members(etcd) == {0: "a"}
        holding.cancel()


@virtual
async def test_an_outage_of_etcd_longer_than_the_lease_costs_nothing(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        await one.claim_index(10)
        before = one.record.lease
        holding = asyncio.ensure_future(one.hold())
        for _ in range(2):
            world.stop()
            await asyncio.sleep(10 * TTL_S)
            assert not holding.done()
            world.start()
            await asyncio.sleep(5 * TTL_S)
        assert not holding.done()
        assert await members(etcd) == {0: "a"}
        assert one.record.lease != before
        await etcd.revoke(before)
        assert await members(etcd) == {0: "a"}, "the old lease no longer carries the key"
        holding.cancel()


@virtual
async def test_a_pserver_whose_lease_is_revoked_is_out(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        await one.claim_index(10)
        await etcd.revoke(one.record.lease)
        async with asyncio.timeout(TTL_S):
            await one.hold()


@virtual
async def test_a_pserver_whose_key_is_deleted_is_out_although_its_lease_lives(world):
    """Whoever evicts it may die before it revokes the lease, or not know that it has: the job waited for a
    parameter server for ever."""
    await loses_its_key(world, successor=False)


@virtual
async def test_a_pserver_whose_key_is_deleted_and_another_ones_is_out(world):
    await loses_its_key(world, successor=True)


async def loses_its_key(world, *, successor):
    etcd = await job(world, 1)
    async with candidate(world, "a") as one, candidate(world, "b") as two:
        await one.claim_index(10)
        holding = asyncio.ensure_future(one.hold())
        await asyncio.sleep(4 * TTL_S)
        one.set(trouble="full")
        await asyncio.sleep(TTL_S)
        assert (holding.done(), await members(etcd)) == (False, {0: "a"})
        await etcd.delete(KEYS.pserver(0))
        if successor:
            assert await two.claim_index(10) == 0
        async with asyncio.timeout(1.0):
            await holding
        assert await etcd.time_to_live(one.record.lease) == -1
        assert await members(etcd) == ({0: "b"} if successor else {})


@virtual
async def test_a_pserver_that_was_cut_off_until_another_took_its_place_is_out(world):
    etcd = await job(world, 1)
    async with candidate(world, "a") as one, candidate(world, "b") as two:
        await one.claim_index(10)
        holding = asyncio.ensure_future(one.hold())
        world.cut("a")
        assert await two.claim_index(60) == 0
        assert not holding.done()
        world.mend("a")
        async with asyncio.timeout(30):
            await holding
        assert await members(etcd) == {0: "b"}


@virtual
async def test_giving_the_index_back_does_not_hang_when_etcd_is_away(world):
    await job(world)
    async with candidate(world, "a") as one:
        await one.claim_index(10)
        world.stop()
        async with asyncio.timeout(5):
            await one.release()


@virtual
async def test_a_pserver_that_slept_longer_than_its_lease_is_in_doubt_until_it_has_looked(world):
    etcd = await job(world, 1)
    async with candidate(world, "sleeper") as one, candidate(world, "b") as two:
        assert not one.in_doubt
        await one.claim_index(10)
        assert not one.in_doubt
        assert await two.claim_index(60) == 0  # nobody renews the sleeper's lease: another takes its place
        assert one.in_doubt
        await one.hold()
        assert one.in_doubt
        assert await members(etcd) == {0: "b"}


async def cut_off_until_its_lease_ran_out(world, timeline):
    """A pserver with parameters of timeline 3; the job is in `timeline` when it reaches etcd again. Answers
    whether it has its index then."""
    etcd = await job(world, 1)
    await etcd.put(KEYS.state, JobState(timeline=3).to_bytes())
    async with candidate(world, "a", fits=lambda state: state.timeline == 3) as one:
        await one.claim_index(10)
        first = (await etcd.get(KEYS.pserver(0))).create_revision
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(one.hold())
            world.cut("a")
            await asyncio.sleep(3 * TTL_S)
            assert (await members(etcd), holding.done()) == ({}, False)
            await etcd.put(KEYS.state, JobState(timeline=timeline).to_bytes())
            world.mend("a")
            await asyncio.sleep(TTL_S)
            has_it = not holding.done()
            holding.cancel()
        assert await members(etcd) == ({0: "a"} if has_it else {})
        assert one.record.since == (first if has_it else 0)
        return has_it


@virtual
async def test_a_pserver_takes_its_index_again_after_its_lease_ran_out(world):
    assert await cut_off_until_its_lease_ran_out(world, timeline=3)


@virtual
async def test_a_pserver_whose_parameters_are_of_an_older_timeline_does_not_take_its_index_again(world):
    assert not await cut_off_until_its_lease_ran_out(world, timeline=4)


async def silent_for(world, silent_s):
    """A holder and a spare while etcd is silent, and after it."""
    etcd = await job(world, 1)
    await etcd.put(KEYS.state, JobState().to_bytes())
    async with candidate(world, "a") as one, candidate(world, "spare") as two:
        await one.claim_index(10)
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(one.hold())
            claiming = group.create_task(two.claim_index(1000))
            await asyncio.sleep(TTL_S)
            world.freeze()
            await asyncio.sleep(silent_s)
            world.thaw()
            await asyncio.sleep(3 * TTL_S)
            assert (await members(etcd), claiming.done()) == ({0: "a"}, False)
            holding.cancel()  # now it dies
            began = clock.monotonic()
            assert await claiming == 0
            assert clock.monotonic() - began <= TTL_S + 1


@virtual
async def test_a_spare_leaves_an_index_to_its_holder_after_etcd_was_silent_for_a_moment(world):
    await silent_for(world, 1.2 * TTL_S)


@virtual
async def test_a_spare_leaves_an_index_to_its_holder_after_etcd_was_silent_for_long(world):
    await silent_for(world, 60.0)


@virtual
async def test_while_etcd_is_away_there_is_nothing_to_doubt(world):
    await job(world, 1)
    async with candidate(world, "a") as one:
        await one.claim_index(10)
        holding = asyncio.ensure_future(one.hold())
        world.stop()
        doubted = 0
        for _ in range(100):
            await asyncio.sleep(TTL_S / 10)
            doubted += one.in_doubt
        assert doubted <= 5, "serving stops for one look at most"
        world.start()
        await asyncio.sleep(2 * TTL_S)
        assert not one.in_doubt
        holding.cancel()
