"""Servers and worlds for the conformance suite."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from shared.etcd import Etcd
from shared.etcd.embedded import EmbeddedEtcd
from tests.etcd.worlds import REAL, RealWorld, SimulatedWorld, World
from tests.fixtures_etcd import embedded_etcd

__all__ = ["embedded_etcd"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers() -> AsyncIterator[Callable[[str], EmbeddedEtcd]]:
    """One server of each binary for all tests that leave it running."""
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    running = {name: EmbeddedEtcd(f"{folder}/{name}", binary=binary) for name, binary in REAL.items()}
    try:
        for server in running.values():
            await server.start()
        yield running.__getitem__
    finally:
        for server in running.values():
            await server.stop()
        shutil.rmtree(folder)


@pytest_asyncio.fixture(params=["simulated", *REAL])
async def world(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedEtcd]) -> AsyncIterator[World]:
    """A world whose etcd stays up."""
    world = SimulatedWorld() if request.param == "simulated" else RealWorld(request.param, servers(request.param))
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
def etcd(world: World) -> Etcd:
    return world.client()


@pytest_asyncio.fixture
async def worlds(servers: Callable[[str], EmbeddedEtcd]) -> AsyncIterator[list[World]]:
    """All worlds; their etcds stay up."""
    made: list[World] = [SimulatedWorld(), *[RealWorld(name, servers(name)) for name in REAL]]
    try:
        yield made
    finally:
        for world in made:
            await world.close()


@pytest_asyncio.fixture
async def breakables() -> AsyncIterator[list[World]]:
    """All worlds; their etcds are the test's own: they may be killed and frozen."""
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    made: list[World] = [SimulatedWorld()]
    try:
        async with AsyncExitStack() as stack:
            for name, binary in REAL.items():
                server = await stack.enter_async_context(EmbeddedEtcd(f"{folder}/{name}", binary=binary))
                made.append(RealWorld(name, server))
            try:
                yield made
            finally:
                for world in made:
                    await world.close()
    finally:
        shutil.rmtree(folder)
