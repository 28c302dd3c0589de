"""A trainer's place among the members."""

from __future__ import annotations

import asyncio

import pytest

from trainer_agent.membership.lease import Membership
from trireme_shared.platform.etcd import Etcd, Put
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Holding, TrainerMember


@pytest.fixture
async def member():
    from tests.equipment.etcd.simulated import SimulatedEtcd

    store = SimulatedEtcd()
    etcd = Etcd(store.transport("trainer"))
    keys = Keys("test")
    record = TrainerMember(trainer="trainer-0-x", url="", incarnation="x", host="here", pid=1)
    return store, etcd, keys, Membership(etcd, record)


async def test_a_trainer_holds_its_place_and_gives_it_back(member):
    _, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    found = await etcd.get(keys.trainer("trainer-0-x"))
    assert found.lease == membership.lease_id != 0
    async with asyncio.TaskGroup() as group:
        group.create_task(membership.hold())
        await asyncio.sleep(0)
        await membership.leave()
    assert await etcd.get(keys.trainer("trainer-0-x")) is None


async def test_a_trainer_whose_key_is_gone_has_lost_its_place(member):
    _, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    await etcd.revoke(membership.lease_id)
    async with asyncio.timeout(10):
        await membership.hold()


async def test_a_trainer_that_the_job_counts_on_no_more_has_lost_its_place_if_its_key_is_deleted(member):
    _, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(membership.hold())
        for listed in (False, True, False, True):
            membership.follow(listed=listed)
            await asyncio.sleep(0.05)
        assert not holding.done()  # it is only left out of the list: its key is there
        await etcd.delete(keys.trainer("trainer-0-x"))
        await asyncio.sleep(1.0)
        assert not holding.done()  # renewed meanwhile
        membership.follow(listed=False)
        async with asyncio.timeout(0.5):
            await holding
    assert await etcd.time_to_live(membership.lease_id) == -1


async def test_a_key_that_survived_an_outage_of_etcd_gets_a_new_lease(member):
    store, etcd, keys, membership = member
    await membership.register(keys, 2.0)
    first = membership.lease_id
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(membership.hold())
        store.stop()
        await asyncio.sleep(2.2)  # longer than the lease lasts by the local clock
        store.start()
        async with asyncio.timeout(10):
            while membership.lease_id == first:
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.2)
        found = await etcd.get(keys.trainer("trainer-0-x"))
        assert (found.lease, holding.done()) == (membership.lease_id, False)
        holding.cancel()


async def test_a_name_that_is_taken_is_not_taken_over(member):
    _, etcd, keys, membership = member
    from trireme_shared.protocol.errors import PeerError

    await etcd.txn([], [Put(keys.trainer("trainer-0-x"), b"{}")])
    with pytest.raises(PeerError, match="is taken"):
        await membership.try_register(keys, 2.0)


@pytest.mark.parametrize("gone", [True, False], ids=["its key was gone", "its key stayed"])
async def test_a_trainer_whose_key_was_gone_doubts_what_it_has_until_it_knows(member, gone):
    store, _, keys, membership = member
    other = Etcd(store.transport("other"))

    async def said() -> Holding | None:
        found = await other.get(keys.trainer("trainer-0-x"))
        return None if found is None else TrainerMember.model_validate_json(found.value).holds

    await membership.register(keys, 2.0)
    membership.set(holds=Holding(timeline=3, version=7))
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(membership.hold())
        first = membership.lease_id
        if gone:
            store.cut("trainer")
            await asyncio.sleep(3.0)
            assert await other.get(keys.trainer("trainer-0-x")) is None
            store.mend("trainer")
        else:
            store.stop()
            await asyncio.sleep(2.2)  # longer than the lease lasts by the local clock
            store.start()
        async with asyncio.timeout(10):
            while membership.lease_id == first or await said() is None:
                await asyncio.sleep(0.05)
        assert await said() == Holding(timeline=3, version=7, doubted=gone)
        membership.without_doubt()
        async with asyncio.timeout(10):
            while await said() != Holding(timeline=3, version=7):
                await asyncio.sleep(0.05)
        holding.cancel()
