"""The keys of a host's places, on virtual time and a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme.pool.host_status import HostMetrics
from trireme.pool.registration import BATCH, PlaceKeys
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.operations import TXN
from trireme_shared.protocol.errors import Conflict, PeerError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import PoolMember

KEYS, TTL_S = ClusterKeys(), 10.0
PLACES = BATCH + 20  # more than one transaction takes


def virtual(test):
    @functools.wraps(test)
    def wrapped():
        rng = random.Random(7)
        run_virtual(VirtualLoop(rng), test(SimulatedEtcd()), rng)

    del wrapped.__wrapped__
    return wrapped


def members(incarnation: str, count: int = PLACES) -> list[PoolMember]:
    return [
        PoolMember(member=f"h-{number}", kind="trainer", host="h", agent="h", pid=1, incarnation=incarnation)
        for number in range(count)
    ]


async def written(etcd: Etcd) -> dict[str, PoolMember]:
    found = (await etcd.range(KEYS.pool, prefix=True)).kvs
    return {kv.key: PoolMember.model_validate_json(kv.value) for kv in found}


@asynccontextmanager
async def held(world: SimulatedEtcd):
    etcd, leases = Etcd(world.transport("agent")), []
    own = PlaceKeys(etcd, KEYS, members("a"), TTL_S, leases.append)
    await own.claim(5.0)
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(own.hold())
        yield own, Etcd(world.transport("observer")), leases, holding
        holding.cancel()


def last(own: PlaceKeys) -> str:
    return max(own.records)


@virtual
async def test_all_places_are_under_one_lease_and_changes_are_written(world):
    async with held(world) as (own, observer, leases, _):
        now = await written(observer)
        assert now == own.records
        assert ({member.lease for member in now.values()}, len(now)) == (set(leases), PLACES)
        own.set(last(own), running="ctr", epoch=3)
        own.set(last(own), trouble="full")
        await asyncio.sleep(1)
        assert (await written(observer))[last(own)] == own.records[last(own)]
        before = (await observer.get(last(own))).mod_revision
        own.set(last(own), running="ctr")
        await asyncio.sleep(1)
        assert (await observer.get(last(own))).mod_revision == before, "what is equal is not written"


@virtual
async def test_an_agent_is_not_ready_while_etcd_is_silent_for_longer_than_its_lease(world):
    metrics = HostMetrics()
    assert "registered" in metrics.missing()
    async with held(world) as (own, _, leases, _):
        metrics.registration = own
        assert metrics.missing() == ""
        world.freeze()
        await asyncio.sleep(TTL_S / 3)
        assert metrics.missing() == ""
        await asyncio.sleep(TTL_S)
        assert "etcd" in metrics.missing()
        world.thaw()
        await asyncio.sleep(TTL_S)
        assert (metrics.missing(), len(leases)) == ("", 2)


@virtual
async def test_after_a_silence_longer_than_the_lease_all_keys_are_written_again(world):
    async with held(world) as (own, observer, leases, holding):
        world.freeze()
        own.set(last(own), running="ctr")
        await asyncio.sleep(4 * TTL_S)
        assert not holding.done()
        world.thaw()
        await asyncio.sleep(TTL_S)
        now = await written(observer)
        assert now == own.records
        assert (now[last(own)].running, {member.lease for member in now.values()}) == ("ctr", {leases[-1]})
        assert len(leases) > 1


@virtual
async def test_a_lease_that_was_revoked_or_a_key_that_was_deleted_costs_no_place(world):
    async with held(world) as (own, observer, leases, _):
        await observer.revoke(leases[-1])
        await asyncio.sleep(TTL_S)
        assert await written(observer) == own.records
        await observer.delete(last(own))
        own.set(last(own), running="ctr")
        await asyncio.sleep(1)
        assert await written(observer) == own.records


@virtual
async def test_a_write_whose_answer_is_lost_is_read_back(world):
    async with held(world) as (own, observer, _, __):
        world.lose_answer(client="agent", method=TXN)
        own.set(last(own), running="one")
        await asyncio.sleep(1)
        own.set(last(own), running="two")
        await asyncio.sleep(5)
        assert (await observer.get(last(own))).version <= 4
        assert (await written(observer))[last(own)].running == "two"


@virtual
async def test_while_etcd_loses_every_answer_a_write_is_tried_with_pauses(world):
    async with held(world) as (own, observer, _, __):
        before = world.calls
        world.unknown_rate = 1.0
        own.set(last(own), running="one")
        for _ in range(1000):  # no time passes
            await asyncio.sleep(0)
        assert world.calls - before < 10
        world.unknown_rate = 0.0
        await asyncio.sleep(2)
        assert (await written(observer))[last(own)].running == "one"


@virtual
async def test_an_agent_waits_for_the_lease_of_a_dead_one_of_its_name(world):
    dead = PlaceKeys(Etcd(world.transport("dead")), KEYS, members("dead"), TTL_S)
    await dead.claim(1.0)
    etcd = Etcd(world.transport("agent"))
    began = asyncio.get_running_loop().time()
    own = PlaceKeys(etcd, KEYS, members("a"), TTL_S)
    await own.claim(60.0)
    assert asyncio.get_running_loop().time() - began < TTL_S + 2
    assert {member.incarnation for member in (await written(etcd)).values()} == {"a"}


@virtual
async def test_an_agent_whose_name_is_taken_leaves_without_a_trace(world):
    async with held(world) as (own, observer, _, __):
        second = PlaceKeys(Etcd(world.transport("second")), KEYS, members("b", PLACES + 1), TTL_S)
        with pytest.raises(Conflict, match="/trireme/pool/trainer/h-0 is another agent's"):
            await second.claim(30.0)
        assert await written(observer) == own.records


@virtual
async def test_an_agent_whose_place_another_one_has_ends_and_leaves_that_one_alone(world):
    async with held(world) as (own, observer, _, holding):
        theirs = own.records[last(own)].model_copy(update={"incarnation": "b"})
        await observer.put(last(own), theirs.to_bytes())
        own.set(last(own), running="ctr")
        async with asyncio.timeout(5):
            await holding
        assert await written(observer) == {last(own): theirs}


@virtual
async def test_a_claim_without_etcd_ends_with_its_error(world):
    world.stop()
    own = PlaceKeys(Etcd(world.transport("agent")), KEYS, members("a"), TTL_S)
    with pytest.raises(PeerError):
        await own.claim(20.0)


@virtual
async def test_released_keys_are_gone_at_once(world):
    async with held(world) as (own, observer, _, holding):
        await own.release()
        assert await written(observer) == {}
        await asyncio.sleep(1)
        assert holding.done()
