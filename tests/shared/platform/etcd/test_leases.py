"""Conformance: leases expire, hold their keys, fence their holders."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from tests.shared.platform.etcd.worlds import everywhere
from trireme_shared.platform.etcd import Compare, Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.operations import GRANT, KEEP_ALIVE
from trireme_shared.platform.runtime import clock


@everywhere
async def test_a_short_lease_granted_after_a_long_one_still_ends_in_its_own_time(world):
    etcd = world.client()
    await etcd.grant(3600)
    short = await etcd.grant(2)
    await etcd.put(world.key, b"", short.id)
    await asyncio.sleep(4)
    assert await etcd.get(world.key) is None


@everywhere
async def test_a_lease_that_nobody_renews_takes_its_keys_with_it_in_one_revision(world):
    etcd = world.client()
    kept, detached, loose = world.key + "kept", world.key + "detached", world.key + "loose"
    granted = clock.monotonic()
    lease = await etcd.grant(0.5)
    assert lease.ttl_s == 2, "etcd grants at least 2 s"
    await etcd.put(kept, b"1", lease.id)
    await etcd.put(kept, b"2", lease.id)
    await etcd.put(detached, b"1", lease.id)
    await etcd.put(detached, b"2")
    first = await etcd.put(loose, b"", lease.id)
    assert (await etcd.get(detached)).lease == 0
    assert (await etcd.get(kept)).lease == lease.id

    deleted = []
    async with asyncio.timeout(5):
        async for batch in etcd.watch(world.key, prefix=True, start_revision=first + 1):
            deleted += [(event.type, event.kv.key, event.kv.mod_revision) for event in batch.events]
            if len(deleted) == 2:
                break
    elapsed = clock.monotonic() - granted
    assert 1.9 < elapsed < 4
    expired = deleted[0][2]
    assert deleted == [("delete", kept, expired), ("delete", loose, expired)]
    assert (await etcd.get(detached)).value == b"2", "an update without the lease frees the key of it"
    assert not lease.alive, "the holder stopped believing before etcd expired it"
    assert lease.lost.is_set()
    answer = await etcd.transport.call(KEEP_ALIVE, {"ID": lease.id}, 2.0)
    assert "TTL" not in answer, "etcd says that a lease is gone by leaving the TTL out"
    await lease.keep_alive()


@everywhere
async def test_a_kept_lease_outlives_its_ttl_and_ends_with_its_revocation(world):
    etcd = world.client()
    key = world.key + "a"
    lease = await etcd.grant(2)
    await etcd.put(key, b"1", lease.id)
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_alive())
        await asyncio.sleep(3.2)
        assert lease.alive
        assert (await etcd.get(key)).version == 1, "renewals write nothing"
        assert await etcd.time_to_live(lease.id) in {1, 2}
        await lease.revoke()
    assert not lease.alive
    assert await etcd.get(key) is None
    assert await etcd.time_to_live(lease.id) == -1
    with pytest.raises(LeaseLost, match="register again"):
        lease.check()


@everywhere
async def test_a_lease_revoked_by_somebody_else_is_lost_at_the_next_renewal(world):
    etcd = world.client()
    lease = await etcd.grant(2)
    await etcd.put(world.key, b"", lease.id)
    async with asyncio.timeout(1.5), asyncio.TaskGroup() as group:
        group.create_task(lease.keep_alive())
        await world.client("peer").revoke(lease.id)
        await lease.lost.wait()
    assert await etcd.get(world.key) is None


async def test_revoking_a_lease_that_is_gone_is_fine(world, etcd):
    lease = await etcd.grant(60)
    await etcd.revoke(lease.id)
    await etcd.revoke(lease.id)
    await etcd.revoke(12345)
    await lease.revoke()


async def test_a_key_cannot_be_put_under_an_unknown_lease(world, etcd):
    with pytest.raises(LeaseLost):
        await etcd.put(world.key, b"", 12345)
    with pytest.raises(LeaseLost):
        await etcd.txn([], [Put(world.key + "a", b""), Put(world.key + "b", b"", 12345)])
    assert (await etcd.range(world.key, prefix=True)).count == 0, "all of a transaction or nothing"
    lost = await etcd.txn([Compare.create(world.key, ">", 0)], [Put(world.key, b"", 12345)])
    assert not lost.succeeded, "only the branch taken counts"


async def test_an_update_moves_a_key_to_another_lease(world, etcd):
    one, other = await etcd.grant(60), await etcd.grant(60)
    await etcd.put(world.key, b"", one.id)
    await etcd.put(world.key, b"", other.id)
    await one.revoke()
    assert (await etcd.get(world.key)).lease == other.id
    await other.revoke()
    assert await etcd.get(world.key) is None


async def test_a_lease_id_is_granted_once(world, etcd):
    body = {"ID": abs(hash(world.key)) | 1 << 61, "TTL": 60}
    assert (await etcd.transport.call(GRANT, body, 2.0))["ID"] == body["ID"]
    with pytest.raises(Exception, match="already exists"):
        await etcd.transport.call(GRANT, body, 2.0)
    await etcd.revoke(body["ID"])


@everywhere
async def test_a_restarted_etcd_gives_every_lease_its_full_ttl(breakable):
    etcd = breakable.client()
    lease = await etcd.grant(4)
    await etcd.put(breakable.key, b"", lease.id)
    await asyncio.sleep(1.5)
    assert await etcd.time_to_live(lease.id) <= 2
    await breakable.restart()
    assert await etcd.time_to_live(lease.id) >= 3
    assert await etcd.get(breakable.key) is not None
    await lease.revoke()


@everywhere
async def test_a_holder_fences_itself_while_etcd_is_frozen_and_before_the_lease_ends_there(breakable):
    etcd = breakable.client()
    sent = clock.monotonic()
    lease = await etcd.grant(2)
    await etcd.put(breakable.key, b"", lease.id)
    async with asyncio.timeout(4), asyncio.TaskGroup() as group:
        group.create_task(lease.keep_alive())
        breakable.freeze()
        await lease.lost.wait()
        elapsed = clock.monotonic() - sent
    assert 1.5 < elapsed < 2.3, "lost by the local clock, before any other could hold the role"
    await asyncio.sleep(0.5)
    breakable.thaw()
    async with asyncio.timeout(3):
        while await etcd.get(breakable.key) is not None:
            await asyncio.sleep(0.05)
    assert not lease.alive, "lost is for ever"


def test_a_holder_that_slept_through_its_ttl_with_its_machine_knows_it_at_once(monkeypatch):
    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("holder"))
        lease = await etcd.grant(60)
        assert lease.alive
        slept = clock.suspended_s() + 61.0
        monkeypatch.setattr(clock, "suspended_s", lambda: slept)
        assert (lease.alive, lease.remaining_s) == (False, 0.0)
        async with asyncio.timeout(60):
            await lease.lost.wait()
        later = await etcd.grant(60)
        assert 50 < later.remaining_s <= 60

    run_virtually(main)


@everywhere
async def test_a_renewal_loop_survives_an_outage_shorter_than_the_ttl(breakable):
    etcd = breakable.client()
    lease = await etcd.grant(6)
    await etcd.put(breakable.key, b"", lease.id)
    async with asyncio.TaskGroup() as group:
        renewing = group.create_task(lease.keep_alive())
        await asyncio.sleep(1.5)
        await breakable.restart()
        async with asyncio.timeout(6):
            while lease.remaining_s < 4.5:
                await asyncio.sleep(0.05)
        assert lease.alive
        assert not renewing.done()
        await lease.revoke()
