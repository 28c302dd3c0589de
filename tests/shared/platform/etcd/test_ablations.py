"""Each safeguard of the client is switched off once, and the fault it keeps out must show."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.shared.platform.etcd.worlds import simulate
from trireme_shared.platform.etcd import Compare, Etcd, OutcomeUnknown, Put, client, fenced
from trireme_shared.platform.etcd.fenced import acquire
from trireme_shared.platform.etcd.operations import TXN
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import PeerError

with_and_without = pytest.mark.parametrize("safe", [True, False], ids=["with", "without"])


@with_and_without
def test_the_lock_compares_the_create_revision(safe, monkeypatch):
    class ByValue(Compare):
        """etcd3-py's recipe: take it when the value is not mine."""

        @classmethod
        def create(cls, key, relation, revision):
            return Compare.mod(key, ">", -1)

    if not safe:
        monkeypatch.setattr(fenced, "Compare", ByValue)
    inside, most = [], 0

    async def contend(etcd, name):
        nonlocal most
        mine = await etcd.grant(60)
        await acquire(etcd, "/lock", name.encode(), mine)
        inside.append(name)
        most = max(most, len(inside))
        await asyncio.sleep(1)
        inside.remove(name)
        await mine.revoke()

    async def main(simulated):
        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(contend(Etcd(simulated.transport(name)), name))

    simulate(main)
    assert (most == 1) is safe


@with_and_without
def test_a_write_is_not_repeated_blindly(safe, monkeypatch):
    """Repeated, its second execution says "somebody else was first" about itself."""
    if not safe:
        monkeypatch.setattr(client, "Retryable", PeerError)
    answers = []

    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))
        simulated.lose_answer(method=TXN)
        try:
            answers.append((await etcd.txn([Compare.create("/a", "==", 0)], [Put("/a", b"mine")])).succeeded)
        except OutcomeUnknown:
            answers.append("unknown")

    simulate(main)
    assert answers == ["unknown" if safe else False]


@with_and_without
def test_a_holder_fences_itself_by_its_own_clock(safe, monkeypatch):
    if not safe:
        monkeypatch.setattr(client, "MARGIN", -2.0)
    overlap = []

    async def main(simulated):
        a, b = Etcd(simulated.transport("a")), Etcd(simulated.transport("b"))
        old = await a.grant(3)
        await acquire(a, "/lock", b"a", old)
        async with asyncio.TaskGroup() as group:
            group.create_task(old.keep_alive())
            await asyncio.sleep(2)
            simulated.cut("a")
            await acquire(b, "/lock", b"b", await b.grant(60))
            overlap.append(old.alive)

    simulate(main)
    assert overlap == [not safe]


@with_and_without
def test_silence_is_taken_for_a_broken_connection(safe, monkeypatch):
    if not safe:
        monkeypatch.setattr(client, "IDLE_LIMIT_S", math.inf)
    seen = []

    async def main(simulated):
        etcd = Etcd(simulated.transport("a"))

        async def follow():
            async for batch in etcd.watch("/a"):
                seen.extend(event.kv.value for event in batch.events)

        following = asyncio.create_task(follow())
        await asyncio.sleep(2)  # etcd has notified of progress
        simulated.forget("a")  # etcd's end of the connection is gone without a word, as after a host's death
        await etcd.put("/a", b"1")
        async with asyncio.timeout(60):
            while not seen and clock.monotonic() < 30:
                await asyncio.sleep(1)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    simulate(main)
    assert seen == ([b"1"] if safe else [])
