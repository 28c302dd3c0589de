"""Faults that only the simulated etcd can produce on demand, and what the client makes of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.shared.platform.etcd.worlds import simulate
from trireme_shared.platform.etcd import Compare, Etcd, Get, LeaseLost, OutcomeUnknown, Put, Retryable
from trireme_shared.platform.etcd.fenced import acquire
from trireme_shared.platform.etcd.operations import GRANT, PUT, REVOKE, TXN
from trireme_shared.platform.runtime import clock


def test_a_write_whose_answer_is_lost_was_applied_and_is_not_repeated():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        simulated.lose_answer(client="a", method=PUT)
        with pytest.raises(OutcomeUnknown):
            await etcd.put("/a", b"1")
        kv = await etcd.get("/a")
        assert (kv.value, kv.version) == (b"1", 1)

    simulate(main)


def test_a_write_whose_request_is_lost_was_not_applied_and_is_not_repeated_either():
    async def main(simulated):
        etcd, other = Etcd(simulated.transport("a")), Etcd(simulated.transport("b"))
        simulated.lose_request(client="a")
        await other.put("/b", b"not concerned")
        with pytest.raises(OutcomeUnknown):
            await etcd.txn([Compare.create("/a", "==", 0)], [Put("/a", b"1")])
        assert await etcd.get("/a") is None

    simulate(main)


def test_reads_and_transactions_that_only_read_are_repeated_through_a_restart():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        await etcd.put("/a", b"1")
        simulated.stop()
        asyncio.get_running_loop().call_later(3, simulated.start)
        assert (await etcd.get("/a")).value == b"1"
        assert (await etcd.txn([], [Get("/a")])).range(0).first.value == b"1"
        assert 3 <= clock.monotonic() < 5

    simulate(main)


def test_a_write_waits_for_an_etcd_that_refuses_connections_and_says_so_at_its_deadline():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        simulated.stop()
        with pytest.raises(Retryable, match="did not do /kv/put of /a within 5 s") as caught:
            await etcd.put("/a", b"1", timeout_s=5)
        assert not isinstance(caught.value, OutcomeUnknown)
        assert 4 < clock.monotonic() <= 5
        asyncio.get_running_loop().call_later(1, simulated.start)
        await etcd.put("/a", b"2", timeout_s=5)
        assert simulated.events()[-1].kv.version == 1

    simulate(main)


def test_a_lease_whose_grant_was_lost_is_granted_again():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        simulated.lose_answer(method=GRANT)
        lease = await etcd.grant(5)
        assert lease.alive
        simulated.lose_answer(method=REVOKE)
        await lease.revoke()
        assert len(simulated.store.leases) == 1
        await asyncio.sleep(6)
        assert simulated.store.leases == {}, "the one nobody knows expired by itself"

    simulate(main)


def test_a_lock_taken_by_a_request_whose_answer_was_lost_is_recognised():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        lease = await etcd.grant(10)
        simulated.lose_answer(method=TXN)
        token = await acquire(etcd, "/lock", b"me", lease)
        assert [e.kv.mod_revision for e in simulated.events()] == [token]

    simulate(main)


def test_a_cut_off_holder_loses_its_lease_before_anybody_else_gets_the_lock():
    async def main(simulated):
        a, b = Etcd(simulated.transport("a")), Etcd(simulated.transport("b"))
        old = await a.grant(3)
        token = await acquire(a, "/lock", b"a", old)
        async with asyncio.TaskGroup() as group:
            group.create_task(old.keep_alive())
            await asyncio.sleep(5)
            simulated.cut("a")
            lost_at = {}

            async def note():
                await old.lost.wait()
                lost_at["a"] = clock.monotonic()

            group.create_task(note())
            new = await b.grant(30)
            newer = await acquire(b, "/lock", b"b", new)
            assert lost_at["a"] < clock.monotonic()
            assert newer > token
            simulated.mend("a")
            with pytest.raises(LeaseLost):
                await a.put("/x", b"", old.id)
            stale = await a.txn([Compare.create("/lock", "==", token)], [Put("/x", b"")])
            assert not stale.succeeded

    for seed in range(10):
        simulate(main, seed)


def test_a_write_sent_into_a_frozen_etcd_is_unknown_and_may_come_true_later():
    applied = set()

    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        simulated.freeze()
        with pytest.raises(OutcomeUnknown):
            await etcd.put("/a", b"1")
        simulated.thaw()
        await asyncio.sleep(0.1)
        applied.add(await etcd.get("/a") is not None)

    for seed in range(20):
        simulate(main, seed)
    assert applied == {True, False}


def test_a_watch_that_is_cut_off_and_reset_again_and_again_loses_and_doubles_nothing():
    async def main(simulated):
        writer, reader, seen = Etcd(simulated.transport("w")), Etcd(simulated.transport("r")), []

        async def follow():
            async for batch in reader.watch("/k/", prefix=True):
                seen.extend((e.kv.mod_revision, e.kv.value) for e in batch.events)

        async def disturb():
            for _ in range(30):
                await asyncio.sleep(simulated.rng.random() * 2)
                match int(simulated.rng.random() * 4):
                    case 0:
                        simulated.disconnect("r")
                    case 1:
                        simulated.cut("r")
                        await asyncio.sleep(simulated.rng.random() * 6)
                        simulated.mend("r")
                    case 2:
                        simulated.freeze()
                        await asyncio.sleep(simulated.rng.random())
                        simulated.thaw()
                    case 3:
                        simulated.stop()
                        await asyncio.sleep(simulated.rng.random())
                        simulated.start()

        async def write():
            for number in range(200):
                with suppress(OutcomeUnknown):
                    await writer.put("/k/a", str(number).encode())
                await asyncio.sleep(simulated.rng.random() / 2)

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            async with asyncio.TaskGroup() as work:
                work.create_task(disturb())
                await asyncio.sleep(0.1)
                work.create_task(write())
            await asyncio.sleep(10)
            following.cancel()
        assert seen == [(e.kv.mod_revision, e.kv.value) for e in simulated.events()]
        assert simulated.open_watches == 0

    for seed in range(5):
        simulate(main, seed)


def test_compaction_under_a_broken_watch_gives_a_snapshot_that_makes_it_whole():
    async def main(simulated):
        writer, reader, state, resets = Etcd(simulated.transport("w")), Etcd(simulated.transport("r")), {}, []

        async def follow():
            async for batch in reader.watch("/k/", prefix=True):
                if batch.reset:
                    resets.append(batch.revision)
                    state.clear()
                    state.update({kv.key: kv.value for kv in batch.kvs})
                for event in batch.events:
                    if event.type == "put":
                        state[event.kv.key] = event.kv.value
                    else:
                        state.pop(event.kv.key)

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await asyncio.sleep(1)
            await writer.put("/k/gone", b"1")
            await asyncio.sleep(1)
            simulated.cut("r")
            await writer.delete("/k/gone")
            await writer.put("/k/new", b"2")
            await writer.compact(simulated.revision)
            simulated.disconnect("r")
            simulated.mend("r")
            await asyncio.sleep(5)
            assert len(resets) == 2
            assert state == {"/k/new": b"2"}
            following.cancel()

    simulate(main)


def test_unknown_outcomes_at_random_never_break_compare_and_set():
    async def main(simulated):
        simulated.unknown_rate = 0.2
        await Etcd(simulated.transport("x")).txn([], [])

        async def add(name):
            etcd, done = Etcd(simulated.transport(name)), 0
            while done < 20:
                kv = await etcd.get(f"/{name}")
                have = int(kv.value) if kv else 0
                done = have
                try:
                    mod = kv.mod_revision if kv else 0
                    await etcd.txn(
                        [Compare.mod(f"/{name}", "==", mod)], [Put(f"/{name}", str(have + 1).encode())]
                    )
                except OutcomeUnknown:
                    continue

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(add(name))
        values = [int(e.kv.value) for e in simulated.events() if e.kv.key == "/a"]
        assert values == list(range(1, len(values) + 1))

    simulate(main)


def test_a_simulation_repeats_from_its_seed():
    async def main(simulated):
        simulated.unknown_rate = 0.1

        async def work(name):
            etcd = Etcd(simulated.transport(name))
            lease = await etcd.grant(2)
            for number in range(20):
                try:
                    await etcd.put(f"/{name}/{number}", b"", lease.id if number % 2 else 0)
                except (OutcomeUnknown, LeaseLost):
                    await asyncio.sleep(0.3)

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(work(name))
        await asyncio.sleep(5)
        return [(clock.monotonic(), simulated.calls)], simulated.events()

    assert simulate(main, 1) == simulate(main, 1)
    assert simulate(main, 1) != simulate(main, 2)


def test_size_bytes_counts_what_is_stored_under_a_prefix():
    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        await etcd.put("/job/tasks/1", b"12345")
        await etcd.put("/job/tasks/1", b"123")
        await etcd.put("/other", b"1234567")
        assert simulated.size_bytes("/job/") == len("/job/tasks/1") + 3

    simulate(main)
