"""A client that knew a newer revision notices that etcd was restored from an older backup; other clients do
not."""

from __future__ import annotations

import asyncio
import copy
from contextlib import aclosing

import pytest

from tests.shared.platform.etcd.worlds import SimulatedWorld
from trireme_shared.platform.etcd import WentBack


@pytest.fixture
async def world():
    world = SimulatedWorld()
    yield world
    await world.close()


async def restored(world, older, *, outage_s=0.1):
    world.simulated.stop()
    await asyncio.sleep(outage_s)
    world.simulated.store.__dict__.update(older)
    world.simulated.start()


def backup(world):
    return copy.deepcopy(vars(world.simulated.store))


async def test_who_read_or_wrote_what_is_gone_hears_it(world):
    reader, writer, newcomer = world.client("reader"), world.client("writer"), world.client("newcomer")
    await writer.put("/j/a", b"1")
    older = backup(world)
    for value in (b"2", b"3", b"4"):
        newer = await writer.put("/j/a", value)
    assert (await reader.get("/j/a")).value == b"4"
    await restored(world, older)
    with pytest.raises(WentBack, match=f"etcd is at revision {newer - 3}, and was at {newer} before"):
        await reader.get("/j/a")
    with pytest.raises(WentBack, match=f"etcd is at revision {newer - 2}, and was at {newer} before"):
        await writer.put("/j/b", b"")
    assert (await newcomer.get("/j/a")).value == b"1"


async def test_a_watch_does_not_wait_for_revisions_that_were_told_already(world):
    watcher, writer = world.client("watcher"), world.client("writer")
    await writer.put("/j/a", b"1")
    older = backup(world)
    seen = asyncio.Event()

    async def follow():
        async with aclosing(watcher.watch("/j/", prefix=True)) as batches:
            async for batch in batches:
                if batch.events and batch.events[-1].kv.value == b"5":
                    seen.set()

    following = asyncio.create_task(follow())
    for number in range(2, 6):
        await writer.put("/j/a", str(number).encode())
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await seen.wait()
    await restored(world, older)
    with pytest.raises(WentBack):
        async with asyncio.timeout(10):
            await following


async def test_an_etcd_that_kept_everything_is_the_same_etcd(world):
    reader, writer = world.client("reader"), world.client("writer")
    await writer.put("/j/a", b"1")
    assert (await reader.get("/j/a")).value == b"1"
    await restored(world, backup(world))
    assert (await reader.get("/j/a")).value == b"1"
    answers = await asyncio.gather(
        *(writer.put("/j/a", bytes([n])) for n in range(20)), *(reader.get("/j/a") for _ in range(20))
    )
    assert len(answers) == 40
