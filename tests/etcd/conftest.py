"""Worlds to test in: the simulated etcd and every real one at hand. The simulator is trusted only where they agree."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from shared.etcd import Etcd, connect
from shared.etcd.embedded import EmbeddedEtcd
from shared.etcd.simulated import SimulatedEtcd
from tests.fixtures_etcd import real_binaries


class World:
    """An etcd and its clients; `key` is a fresh prefix, so that tests may share a server."""

    name: str
    simulated: SimulatedEtcd | None = None

    def __init__(self) -> None:
        self.key = f"/{random.getrandbits(64):x}/"
        self.clients: list[Etcd] = []

    def client(self, name: str = "client") -> Etcd:
        client = self._connect(name)
        self.clients.append(client)
        return client

    def _connect(self, name: str) -> Etcd:
        raise NotImplementedError

    async def restart(self) -> None:
        raise NotImplementedError

    def freeze(self) -> None:
        raise NotImplementedError

    def thaw(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


class SimulatedWorld(World):
    name = "simulated"

    def __init__(self) -> None:
        super().__init__()
        self.simulated = SimulatedEtcd(rng=random.Random(7), delay_s=(0.0, 0.002))

    def _connect(self, name: str) -> Etcd:
        return Etcd(self.simulated.transport(name))

    async def restart(self) -> None:
        self.simulated.stop()
        await asyncio.sleep(0.1)
        self.simulated.start()

    def freeze(self) -> None:
        self.simulated.freeze()

    def thaw(self) -> None:
        self.simulated.thaw()

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(0.01)
        assert self.simulated.open_watches == 0, "a watch was left open"


class RealWorld(World):
    def __init__(self, name: str, embedded: EmbeddedEtcd) -> None:
        super().__init__()
        self.name = name
        self.embedded = embedded

    def _connect(self, name: str) -> Etcd:
        return connect([self.embedded.url])

    async def restart(self) -> None:
        await self.embedded.kill()
        await self.embedded.start()

    def freeze(self) -> None:
        self.embedded.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.embedded.send(signal.SIGCONT)


REAL = real_binaries()


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


@pytest_asyncio.fixture(params=["simulated", *REAL])
async def breakable(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world whose etcd is the test's own: it may be killed and frozen."""
    if request.param == "simulated":
        simulated = SimulatedWorld()
        yield simulated
        await simulated.close()
        return
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    try:
        async with EmbeddedEtcd(folder, binary=REAL[request.param]) as embedded:
            real = RealWorld(request.param, embedded)
            try:
                yield real
            finally:
                await real.close()
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def etcd(world: World) -> Etcd:
    return world.client()
