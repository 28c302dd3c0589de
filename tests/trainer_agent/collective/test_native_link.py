"""The thread of a native group: whoever is cancelled while it works hears of it when the thread touches no
memory any more."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from trainer_agent.collective.native import link as link_module
from trainer_agent.collective.native.link import Link, Meeting, NativeStatement, OperationLimit
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.collective.group import Broken
from trireme_shared.platform.etcd import Etcd


async def test_waiting_for_the_thread_ends_with_its_work_and_then_with_the_cancellation():
    link, going_on, done = (
        Link("127.0.0.1", "gloo", 1, OperationLimit()),
        threading.Event(),
        threading.Event(),
    )

    def work() -> None:
        going_on.wait(5.0)
        done.set()

    async def use() -> None:
        try:
            await link.call(work)
        finally:
            await link.idle()

    using = asyncio.ensure_future(use())
    await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.sleep(0.01)
    assert not using.done()
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert done.is_set()

    async def ends_with_an_error() -> None:
        try:
            raise ValueError
        finally:
            await link.idle()

    going_on.clear()
    working = asyncio.ensure_future(link.call(work))
    await asyncio.sleep(0.01)
    ending = asyncio.ensure_future(ends_with_an_error())
    await asyncio.sleep(0.01)
    ending.cancel()
    await asyncio.sleep(0.01)
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await working
    link.close()


async def test_a_group_that_is_still_being_built_when_it_is_cut_is_not_waited_for(monkeypatch):
    """A peer has gone on to the next generation before it connected: Gloo waits for it until its time
    limit."""
    link, connected = Link("127.0.0.1", "gloo", 1, OperationLimit()), threading.Event()

    class Unconnected:
        def __init__(self, *_: object) -> None:
            connected.wait(5.0)
            raise Broken("nobody connected")

    monkeypatch.setattr("trainer_agent.collective.native.link.Group", Unconnected)
    await link.listen()
    meeting = SimpleNamespace(rank=0, size=2, prefix="")
    connecting = asyncio.ensure_future(link.connect(meeting, []))
    await asyncio.sleep(0.05)
    connecting.cancel()
    await asyncio.wait([connecting])
    link.cut()
    async with asyncio.timeout(1.0):
        await link.idle()
    link.close()
    connected.set()
    await asyncio.sleep(0.05)  # what it raises in the end is an error of nobody


class InMemory:
    """A Meeting of members of one process."""

    def __init__(self, rank: int, values: dict[str, bytes]) -> None:
        self.rank, self.size, self.prefix, self._values = rank, 2, "", values

    async def put(self, name: str, value: bytes) -> None:
        self._values[name] = value

    async def values(self, names: list[str]) -> list[bytes]:
        while not self._values.keys() >= set(names):
            await asyncio.sleep(0.005)
        return [self._values[name] for name in names]


@pytest.mark.parametrize("where", ["while it is built", "in an operation"])
async def test_a_broken_group_is_free_without_looking_for_circles(where):
    """Its error goes through several tasks. Descriptors and threads of one group after the other stayed for
    minutes."""

    async def broken() -> None:
        values: dict[str, bytes] = {}
        links = [Link("127.0.0.1", "gloo", 1, OperationLimit()) for _ in range(2)]
        listeners = [await link.listen() for link in links]
        statements = [SimpleNamespace(listener=listener) for listener in listeners]

        async def one(rank: int) -> None:
            link = links[rank]
            try:
                if where == "in an operation" or rank == 0:
                    await link.connect(InMemory(rank, values), statements)
                    async with SingleErrorGroup() as tasks:
                        tasks.create_task(link.call(link.group.exchange, [rank], 5.0))
                        if rank:
                            raise Broken("a peer is gone")
                else:
                    await asyncio.sleep(0.1)
                    links[0].cut()
            finally:
                link.cut()
                await link.idle()
                link.close()

        with suppress(Broken):
            async with SingleErrorGroup() as tasks:
                for rank in range(2):
                    tasks.create_task(one(rank))

    await broken()
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for _ in range(5):
            await broken()
        async with asyncio.timeout(15.0):  # of a build that nothing ends but its time limit
            while descriptors() > before:
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


async def test_a_statement_that_is_lost_is_not_waited_for_for_ever(monkeypatch):
    """Somebody deletes it, or it is written under a lease that ends: its trainer waits for it as all others
    do. A further attempt writes it anew."""
    monkeypatch.setattr(link_module, "MEETING_S", 0.3)
    etcd = Etcd(SimulatedEtcd().transport("test"))

    async def met(attempt: int) -> list[list[NativeStatement]]:
        meetings = [Meeting(etcd, "/meeting/", attempt, lambda: 0, rank, 2) for rank in range(2)]
        said = [
            NativeStatement(trainer=f"t{n}", version=n, listener=None, network="n", manifest={})
            for n in range(2)
        ]
        first = asyncio.ensure_future(meetings[0].statements(said[0]))
        if attempt == 0:
            await asyncio.sleep(0.05)
            await etcd.delete(f"{meetings[0].prefix}statements/0")
        return list(await asyncio.gather(first, meetings[1].statements(said[1])))

    async with asyncio.timeout(10):
        with pytest.raises(Broken, match=r"waited 0\.3 s for the statements of 2 trainers at /meeting/0/"):
            await met(0)
        assert [[each.version for each in found] for found in await met(1)] == [[0, 1]] * 2


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208
