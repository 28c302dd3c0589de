"""Conformance: watches deliver every event once and in order, through restarts, freezes and compactions."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tests.shared.platform.etcd.worlds import everywhere, simulate
from trireme_shared.platform.etcd import Delete, Etcd, Put
from trireme_shared.platform.etcd.client import CREATED_LIMIT_S, IDLE_LIMIT_S
from trireme_shared.platform.runtime import clock


class Follower:
    """Follows a prefix in the background and keeps what it saw."""

    def __init__(self, etcd, key, start_revision=0):
        self.batches, self.seen, self.state = [], [], {}
        self._watch = etcd.watch(key, prefix=True, start_revision=start_revision)

    async def __aenter__(self):
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_):
        assert not self._task.done() or self._task.exception() is None, "a watch never ends by itself"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self):
        async with aclosing(self._watch) as batches:
            async for batch in batches:
                self.batches.append(batch)
                if batch.reset:
                    self.state = {kv.key: kv.value for kv in batch.kvs}
                for event in batch.events:
                    self.seen.append((event.kv.mod_revision, event.type, event.kv.key, event.kv.value))
                    if event.type == "put":
                        self.state[event.kv.key] = event.kv.value
                    else:
                        del self.state[event.kv.key]

    async def until(self, predicate, limit_s=10):
        async with asyncio.timeout(limit_s):
            while not predicate(self):
                await asyncio.sleep(0.01)


async def test_a_watch_starts_with_a_snapshot_and_goes_on_with_events(world, etcd):
    await etcd.put(world.key + "a", b"1")
    before = await etcd.put(world.key + "b", b"2")
    async with Follower(etcd, world.key) as follower:
        await follower.until(lambda f: f.batches)
        put = await etcd.put(world.key + "a", b"3")
        await etcd.put(world.key[:-1] + "0", b"outside")
        await etcd.delete(world.key + "b")
        await follower.until(lambda f: len(f.seen) == 2)
    snapshot, *changes = follower.batches
    assert (snapshot.reset, snapshot.events) == (True, ())
    assert snapshot.revision >= before
    assert [(kv.key[-1], kv.value) for kv in snapshot.kvs] == [("a", b"1"), ("b", b"2")]
    assert follower.seen == [(put, "put", world.key + "a", b"3"), (put + 2, "delete", world.key + "b", b"")]
    assert changes[-1].revision == put + 2


async def test_events_of_one_transaction_come_together(world, etcd):
    await etcd.put(world.key + "old", b"")
    async with Follower(etcd, world.key) as follower:
        await follower.until(lambda f: f.batches)
        result = await etcd.txn(
            [], [Put(world.key + "a", b"1"), Put(world.key + "b", b"2"), Delete(world.key + "old")]
        )
        await follower.until(lambda f: len(f.batches) == 2)
    batch = follower.batches[1]
    assert batch.revision == result.revision
    assert {(e.type, e.kv.key[len(world.key) :], e.kv.mod_revision) for e in batch.events} == {
        *(("put", "a", result.revision), ("put", "b", result.revision), ("delete", "old", result.revision)),
    }


async def test_a_watch_replays_from_its_start_revision(world, etcd):
    revisions = [await etcd.put(world.key + "a", str(n).encode()) for n in range(5)]
    async with Follower(etcd, world.key, start_revision=revisions[2]) as follower:
        await follower.until(lambda f: len(f.seen) == 3)
    assert [value for *_, value in follower.seen] == [b"2", b"3", b"4"]


async def test_a_message_longer_than_a_mebibyte_arrives_whole(world, etcd):
    async with Follower(etcd, world.key) as follower:
        await follower.until(lambda f: f.batches)
        await etcd.txn([], [Put(f"{world.key}{n:03}", bytes(8000)) for n in range(120)])
        await follower.until(lambda f: len(f.seen) == 120)
    assert all(len(value) == 8000 for *_, value in follower.seen)


async def test_a_watch_whose_start_was_compacted_starts_over_with_a_snapshot(world, etcd):
    first = await etcd.put(world.key + "gone", b"1")
    await etcd.delete(world.key + "gone")
    last = await etcd.put(world.key + "there", b"2")
    await etcd.compact(last)
    async with Follower(etcd, world.key, start_revision=first) as follower:
        await follower.until(lambda f: f.batches)
        await etcd.put(world.key + "next", b"3")
        await follower.until(lambda f: len(f.seen) == 1)
    assert follower.batches[0].reset
    assert [kv.key for kv in follower.batches[0].kvs] == [world.key + "there"]
    assert follower.state == {world.key + "there": b"2", world.key + "next": b"3"}


@everywhere
async def test_a_watch_survives_a_killed_etcd_and_delivers_each_event_once(breakable):
    etcd = breakable.client()
    key = breakable.key
    written = 0

    async def write(client, name):
        nonlocal written
        for number in range(60):
            try:
                await client.put(f"{key}{name}", str(number).encode(), timeout_s=5)
            except Exception:
                await asyncio.sleep(0.05)
            written += 1
            await asyncio.sleep(0.01)

    async with Follower(etcd, key) as follower:
        await follower.until(lambda f: f.batches)
        async with asyncio.TaskGroup() as group:
            for name in "ab":
                group.create_task(write(breakable.client(name), name))
            await asyncio.sleep(0.3)
            await breakable.restart()
        truth = await etcd.range(key, prefix=True)
        last = max(kv.mod_revision for kv in truth.kvs)
        await follower.until(lambda f: f.seen and f.seen[-1][0] == last)
    assert follower.state == {kv.key: kv.value for kv in truth.kvs}
    assert sum(batch.reset for batch in follower.batches) == 1
    per_key = {kv.key: [rev for rev, _, name, _ in follower.seen if name == kv.key] for kv in truth.kvs}
    for kv in truth.kvs:
        assert per_key[kv.key] == sorted(set(per_key[kv.key])), "in order, none twice"
        assert len(per_key[kv.key]) == kv.version, "none lost: each put made one version"


@everywhere
async def test_a_quiet_watch_follows_the_revision_so_that_compaction_does_not_reset_it(breakable):
    etcd = breakable.client()
    await etcd.put(breakable.key + "quiet/a", b"1")
    async with Follower(etcd, breakable.key + "quiet/") as follower:
        await follower.until(lambda f: f.batches)
        for _ in range(5):
            last = await etcd.put(breakable.key + "busy", b"")
        await asyncio.sleep(2.5)
        await etcd.compact(last)
        await breakable.restart()
        await etcd.put(breakable.key + "quiet/a", b"2")
        await follower.until(lambda f: f.seen)
    assert len(follower.batches) == 2, "resumed after the compacted revision: no second snapshot"


@everywhere
async def test_a_frozen_etcd_is_noticed_by_its_silence_and_the_watch_goes_on_after_it(breakable):
    etcd = breakable.client()
    async with Follower(etcd, breakable.key) as follower:
        await follower.until(lambda f: f.batches)
        await etcd.put(breakable.key, b"1")
        await follower.until(lambda f: f.seen)
        breakable.freeze()
        await asyncio.sleep(IDLE_LIMIT_S + 1.0)
        breakable.thaw()
        thawed = clock.monotonic()
        await etcd.put(breakable.key, b"2")
        await follower.until(lambda f: len(f.seen) >= 2)
        assert clock.monotonic() - thawed < 5
    assert [value for *_, value in follower.seen] == [b"1", b"2"]


async def test_a_watch_that_is_cancelled_or_left_closes_its_stream(world, etcd):
    async with Follower(etcd, world.key) as follower:
        await follower.until(lambda f: f.batches)
    async for batch in etcd.watch(world.key, prefix=True):
        assert batch.reset
        break
    await asyncio.sleep(0.02)
    if world.simulated is not None:
        assert world.simulated.open_watches == 0


def test_a_watch_that_etcd_never_confirms_is_asked_for_again():
    async def scenario(simulated):
        transport = FirstWatchUnanswered(simulated.transport("client"))
        etcd = Etcd(transport)
        async with Follower(etcd, "/a") as follower:
            await follower.until(lambda f: f.batches)
            await etcd.put("/a", b"1")
            await follower.until(lambda f: f.seen, limit_s=2 * CREATED_LIMIT_S)
        await etcd.close()
        return transport.watches, [value for *_, value in follower.seen]

    assert simulate(scenario) == (2, [b"1"])


class FirstWatchUnanswered:
    """A transport whose first watch is silent, from its beginning on."""

    def __init__(self, inner):
        self._inner, self.watches = inner, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def stream(self, method, body):
        self.watches += 1
        if self.watches == 1:
            await asyncio.Event().wait()
        async with aclosing(self._inner.stream(method, body)) as messages:
            async for message in messages:
                yield message
