"""Conformance: the fenced lock. One holder at a time, tokens only grow, a lost lease loses it."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.shared.platform.etcd.worlds import everywhere
from trireme_shared.platform.etcd import Compare, LeaseLost, Put
from trireme_shared.platform.etcd.fenced import acquire, try_acquire
from trireme_shared.platform.runtime import clock


async def test_contenders_exclude_each_other_and_tokens_grow(world):
    key, proof = world.key + "lock", world.key + "proof"
    inside, tokens, fenced = [], [], []

    async def contend(name):
        etcd = world.client(name)
        for _ in range(3):
            lease = await etcd.grant(10)
            token = await acquire(etcd, key, name.encode(), lease)
            inside.append(name)
            assert inside == [name], "two holders at once"
            tokens.append(token)
            await asyncio.sleep(0.005)
            result = await etcd.txn([Compare.create(key, "==", token)], [Put(proof, name.encode())])
            fenced.append(result.succeeded)
            inside.remove(name)
            await lease.revoke()

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(contend(f"c{number}"))
    assert len(tokens) == 15
    assert tokens == sorted(set(tokens)), "fencing tokens only grow"
    assert all(fenced)


async def test_a_deposed_holders_write_is_fenced_by_its_token(world, etcd):
    key = world.key + "lock"
    old = await etcd.grant(10)
    token = await acquire(etcd, key, b"old", old)
    await etcd.revoke(old.id)
    new = await etcd.grant(10)
    newer = await acquire(etcd, key, b"new", new)
    assert newer > token
    assert old.alive, "it still believes"
    stale = await etcd.txn([Compare.create(key, "==", token)], [Put(world.key + "state", b"old")])
    assert not stale.succeeded
    await new.revoke()


@everywhere
async def test_the_lock_of_a_dead_holder_is_taken_when_its_lease_ends(world):
    etcd = world.client()
    key = world.key + "lock"
    dead = await etcd.grant(2)
    await acquire(etcd, key, b"dead", dead)
    begun = clock.monotonic()
    lease = await etcd.grant(30)
    async with asyncio.timeout(15):
        await acquire(etcd, key, b"next", lease)
    assert 1.5 < clock.monotonic() - begun < 10  # a busy machine is late; etcd is not early
    await lease.revoke()


async def test_a_candidate_that_proves_the_holder_dead_need_not_wait_for_the_ttl(world, etcd):
    key = world.key + "lock"
    dead = await etcd.grant(60)
    await acquire(etcd, key, b"http://dead", dead)
    lease = await etcd.grant(10)
    asked = []

    async def probe(holder):
        asked.append(holder.value)
        await etcd.revoke(holder.lease)

    async with asyncio.timeout(2):
        await acquire(etcd, key, b"http://next", lease, on_wait=probe)
    assert asked == [b"http://dead"]
    await lease.revoke()


async def test_asking_again_with_the_same_lease_gives_the_same_token(world, etcd):
    lease = await etcd.grant(10)
    token = await acquire(etcd, world.key, b"me", lease)
    assert await try_acquire(etcd, world.key, b"me", lease) == token
    other = await etcd.grant(10)
    holder = await try_acquire(etcd, world.key, b"you", other)
    assert (holder.value, holder.create_revision) == (b"me", token)
    await lease.revoke()
    await other.revoke()


@everywhere
async def test_waiting_ends_when_the_candidates_own_lease_is_lost(world):
    etcd = world.client()
    holder = await etcd.grant(60)
    await acquire(etcd, world.key, b"holder", holder)
    mine = await etcd.grant(2)
    begun = clock.monotonic()
    with pytest.raises(LeaseLost):
        await acquire(etcd, world.key, b"me", mine)
    assert clock.monotonic() - begun < 10  # the holder would keep it for 60 s
    await holder.revoke()


async def test_a_candidate_of_a_lock_that_is_held_for_long_asks_for_no_compacted_revision(world, etcd):
    """Each standby logged a compacted watch every few seconds, for as long as the leader led."""
    dead = await etcd.grant(60)
    await acquire(etcd, world.key, b"holder", dead)
    for _ in range(3):
        last = await etcd.put(world.key + "busy", b"")
    await etcd.compact(last)
    waiting = asyncio.Event()

    async def waits(_):
        waiting.set()

    with capture_logs() as logs:
        lease = await etcd.grant(10)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            taken = group.create_task(acquire(etcd, world.key, b"next", lease, on_wait=waits))
            await waiting.wait()
            await asyncio.sleep(0.3)
            await etcd.revoke(dead.id)
        assert await taken
    assert [entry["event"] for entry in logs if entry["event"].startswith("watch")] == []
    await lease.revoke()
