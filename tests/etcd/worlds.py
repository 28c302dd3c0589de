"""Worlds to test in: the simulated etcd and every real one at hand. The simulator is trusted only where they agree."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

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


def everywhere(scenario: Callable[[World], Awaitable[None]]) -> Callable[[list[World]], Awaitable[None]]:
    """A test that runs `scenario(world)` in all worlds at once, because it waits for time to pass.

    If the scenario's argument is called `breakable`, each world's etcd is its own, to be killed and frozen.
    """

    async def run(world: World) -> None:
        try:
            await scenario(world)
        except Exception as error:
            error.add_note(f"in the world of {world.name}")
            raise

    async def at_once(worlds: list[World]) -> None:
        async with asyncio.TaskGroup() as group:
            for world in worlds:
                group.create_task(run(world))

    async def on_shared(worlds: list[World]) -> None:
        await at_once(worlds)

    async def on_own(breakables: list[World]) -> None:
        await at_once(breakables)

    own = "breakable" in scenario.__code__.co_varnames[: scenario.__code__.co_argcount]
    test = on_own if own else on_shared
    test.__name__, test.__qualname__, test.__module__ = scenario.__name__, scenario.__qualname__, scenario.__module__
    return test
