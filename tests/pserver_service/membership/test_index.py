"""The place of a pserver among its peers, on virtual time and a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import pytest

from pserver_service.membership.index import OwnIndex
from shared.errors import DeadlineExceeded
from shared.etcd import Etcd
from shared.etcd.transport import TXN
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import JobSpec, PserverMember
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from tests.pserver_service.jobs import JOB

KEYS = Keys(JOB)
TTL_S = 5.0
SPEC = JobSpec(job=JOB, script="s.py", dataset={"kind": "csv", "urls": ["x.csv"]}, storage="/tmp/x", lease_ttl_s=TTL_S)


def virtual(test):
    """Run an async test on a virtual loop."""

    @functools.wraps(test)
    def wrapped(*args):
        rng = random.Random(7)
        run_virtual(VirtualLoop(rng), test(SimulatedEtcd(), *args), rng)

    del wrapped.__wrapped__
    return wrapped


@asynccontextmanager
async def candidate(world: SimulatedEtcd, name: str):
    """A pserver's own index with its directory running beside it."""
    etcd = Etcd(world.transport(name))
    directory = Directory(etcd, KEYS)
    member = PserverMember(index=-1, url=f"http://{name}:1", incarnation=name, host="h", pid=1)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run())
        yield OwnIndex(etcd, directory, member)
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
async def test_the_lowest_free_index_is_claimed(world):
    etcd = await job(world, 3)
    async with candidate(world, "a") as one, candidate(world, "b") as two, candidate(world, "c") as three:
        assert [await each.claim_lowest(10) for each in (one, two, three)] == [0, 1, 2]
        assert await members(etcd) == {0: "a", 1: "b", 2: "c"}
        await two.release()
        assert await members(etcd) == {0: "a", 2: "c"}
        async with candidate(world, "d") as four:
            assert await four.claim_lowest(10) == 1


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
        assert sorted(await asyncio.gather(*(each.claim_lowest(60) for each in (a, b, c, d)))) == [0, 1, 2, 3]
    assert len(await members(etcd)) == 4


@virtual
async def test_a_claim_waits_for_a_job_and_says_so(world):
    async with candidate(world, "a") as one:
        with pytest.raises(DeadlineExceeded, match="waited 3 s for job/spec and ps_desired"):
            await one.claim_lowest(3)
        claim = asyncio.ensure_future(one.claim_lowest(60))
        await asyncio.sleep(10)
        await job(world)
        assert await claim == 0


@virtual
async def test_a_spare_waits_for_a_place_and_takes_that_of_a_dead_one(world):
    etcd = await job(world, 1)
    async with candidate(world, "dead") as dead:
        await dead.claim_lowest(10)  # and never renews
    async with candidate(world, "b") as spare:
        with pytest.raises(DeadlineExceeded, match="for a free place among 1 pservers"):
            await spare.claim_lowest(1)
        assert await spare.claim_lowest(3 * TTL_S) == 0
        assert await members(etcd) == {0: "b"}


@virtual
async def test_an_index_whose_key_says_something_else_now_is_lost(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        holding = await one.claim_lowest(10)
        await etcd.put(KEYS.pserver(holding), b"not ours", one.lease.id)
        assert await one.write(draining=True) is False


@virtual
async def test_a_claim_whose_answer_is_lost_is_read_back(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        world.lose_answer(client="a", method=TXN)
        assert await one.claim_lowest(30) == 0
        holding = asyncio.ensure_future(one.hold())
        await asyncio.sleep(5 * TTL_S)
        assert not holding.done()
        assert await members(etcd) == {0: "a"}
        holding.cancel()


@virtual
async def test_an_outage_of_etcd_longer_than_the_lease_costs_nothing(world):
    etcd = await job(world)
    async with candidate(world, "a") as one:
        await one.claim_lowest(10)
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
        await one.claim_lowest(10)
        await etcd.revoke(one.record.lease)
        async with asyncio.timeout(TTL_S):
            await one.hold()


@virtual
async def test_a_pserver_that_was_cut_off_until_another_took_its_place_is_out(world):
    etcd = await job(world, 1)
    async with candidate(world, "a") as one, candidate(world, "b") as two:
        await one.claim_lowest(10)
        holding = asyncio.ensure_future(one.hold())
        world.cut("a")
        assert await two.claim_lowest(60) == 0
        assert not holding.done()
        world.mend("a")
        async with asyncio.timeout(30):
            await holding
        assert await members(etcd) == {0: "b"}


@virtual
async def test_giving_the_index_back_does_not_hang_when_etcd_is_away(world):
    await job(world)
    async with candidate(world, "a") as one:
        await one.claim_lowest(10)
        world.stop()
        async with asyncio.timeout(5):
            await one.release()


@virtual
async def test_a_pserver_that_slept_longer_than_its_lease_is_in_doubt_until_it_has_looked(world):
    etcd = await job(world, 1)
    async with candidate(world, "sleeper") as one, candidate(world, "b") as two:
        assert not one.in_doubt
        await one.claim_lowest(10)
        assert not one.in_doubt
        assert await two.claim_lowest(60) == 0  # nobody renews the sleeper's lease: another takes its place
        assert one.in_doubt
        await one.hold()
        assert one.in_doubt
        assert await members(etcd) == {0: "b"}


@virtual
async def test_while_etcd_is_away_there_is_nothing_to_doubt(world):
    await job(world, 1)
    async with candidate(world, "a") as one:
        await one.claim_lowest(10)
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
