"""Worlds to test in: the simulated etcd and every real one at hand. The simulator is trusted only where they
agree."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType

from tests.equipment.etcd.real import real_binaries
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.stopping import stop
from tests.equipment.virtual_loop import VirtualLoop, run
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd


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


SHARED = "-shared"


class RealWorld(World):
    """With SHARED in its name: all watches of a client go over one connection."""

    def __init__(self, name: str, embedded: EmbeddedEtcd) -> None:
        super().__init__()
        self.name = name
        self.embedded = embedded

    def _connect(self, name: str) -> Etcd:
        return connect([self.embedded.url], share_watches=self.name.endswith(SHARED))

    async def restart(self) -> None:
        await self.embedded.kill()
        await self.embedded.start()

    def freeze(self) -> None:
        stop(self.embedded.pid)

    def thaw(self) -> None:
        self.embedded.send(signal.SIGCONT)


def simulate(main, seed=0):
    """Run `main(simulated)` in virtual time, with delays drawn from the seed."""
    rng = random.Random(seed)

    async def wrapped():
        return await main(SimulatedEtcd(rng=rng, delay_s=(0.0005, 0.003)))

    return run(VirtualLoop(rng), wrapped(), rng)


REAL = real_binaries()
REAL |= {f"{name}{SHARED}": binary for name, binary in REAL.items()}


Scenario = Callable[[World], Awaitable[None]]
Outcomes = dict[Scenario, BaseException | None]


def everywhere(scenario: Scenario) -> Callable[[Outcomes], None]:
    """A test that waits for time to pass: all of its kind run at once (fixture `outcomes`), each in all
    worlds.

    If the scenario's argument is called `breakable`, each world's etcd is its own, to be killed and frozen.
    """

    def test(outcomes: Outcomes) -> None:
        if (error := outcomes[scenario]) is not None:
            raise error

    test.scenario = scenario  # type: ignore[attr-defined]
    test.__name__, test.__qualname__, test.__module__ = (
        scenario.__name__,
        scenario.__qualname__,
        scenario.__module__,
    )
    return test


def breaks_etcd(scenario: Scenario) -> bool:
    code: CodeType = scenario.__code__  # type: ignore[attr-defined]
    return code.co_varnames[0] == "breakable"


async def run_everywhere(scenario: Scenario, servers: Callable[[str], EmbeddedEtcd], folder: Path) -> None:
    """Run one scenario in all worlds, and note in which one it failed."""

    async def run(world: World) -> None:
        try:
            await scenario(world)
        except Exception as error:
            error.add_note(f"in the world of {world.name}")
            raise
        finally:
            await world.close()

    async def with_own_server(name: str) -> None:
        async with EmbeddedEtcd(folder / f"{scenario.__name__}-{name}", binary=REAL[name]) as server:
            await run(RealWorld(name, server))

    async with asyncio.TaskGroup() as group:
        group.create_task(run(SimulatedWorld()))
        for name in REAL:
            own = breaks_etcd(scenario)
            group.create_task(with_own_server(name) if own else run(RealWorld(name, servers(name))))
