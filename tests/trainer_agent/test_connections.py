"""When a trainer closes its ports to parameter servers: real connections, what is registered by hand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.waiting import until
from trainer_agent.data_plane.stream import Connections
from trainer_agent.settings import Settings
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import PserverMember, SlotMap

STALL_S = 20.0


@asynccontextmanager
async def silent_pserver():
    """(its URL, the paths of requests that wait there): it answers none."""
    waiting: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        waiting.append(request.path)
        try:
            await asyncio.Event().wait()
        finally:
            waiting.remove(request.path)
        raise AssertionError

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", waiting
    finally:
        await runner.cleanup()


def member(url: str, incarnation: str, index: int = 1) -> PserverMember:
    return PserverMember(index=index, url=url, incarnation=incarnation, host="h", pid=1)


@asynccontextmanager
async def asked(url: str, waiting: list[str]):
    """(connections, directory, a call that waits at pserver-1 of incarnation a)."""
    directory = Directory(Etcd(SimulatedEtcd().transport("trainer")), Keys("j"))
    directory.slots = SlotMap(version=1, owners=(0, 1))
    directory.pservers = {0: member(url, "z", 0), 1: member(url, "a")}
    async with Connections(Settings(job="j", transport="tcp"), STALL_S) as connections:
        call = asyncio.create_task(connections(directory.pservers[1]).info())
        try:
            await until(lambda: waiting, "the call to arrive", 10.0)
            yield connections, directory, call
        finally:
            call.cancel()
            await asyncio.wait([call])


async def failed(call: asyncio.Task) -> bool:
    """Long before a silent peer is given up."""
    await asyncio.wait([call], timeout=2.0)
    return call.done() and isinstance(call.exception(), PeerError)


async def test_the_port_to_a_replaced_parameter_server_is_closed_and_the_next_call_is_its_successors():
    async with silent_pserver() as (url, waiting), asked(url, waiting) as (connections, directory, call):
        before = connections(directory.pservers[1])
        directory.pservers = {**directory.pservers, 1: member(url, "b")}
        connections.follow(directory)
        assert await failed(call)
        await until(lambda: not waiting, "the connection to end", 5.0)
        assert connections(directory.pservers[1]) is not before


async def test_the_port_to_a_parameter_server_without_slots_is_closed():
    async with silent_pserver() as (url, waiting), asked(url, waiting) as (connections, directory, call):
        directory.pservers = {0: directory.pservers[0]}
        directory.slots = SlotMap(version=2, owners=(0, 0))
        connections.follow(directory)
        assert await failed(call)
        await until(lambda: not waiting, "the connection to end", 5.0)


async def test_a_parameter_server_that_is_only_not_registered_may_come_back():
    async with silent_pserver() as (url, waiting), asked(url, waiting) as (connections, directory, call):
        known = directory.pservers
        before = connections(known[1])
        for seen in ({0: known[0]}, {}, known):
            directory.pservers = seen
            connections.follow(directory)
            await asyncio.sleep(0.05)
            assert not call.done()
        assert connections(known[1]) is before
