"""Processes of a communicator that decide about epochs, in virtual time over a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme_shared.collective.decider import Decider
from trireme_shared.collective.reach import CONNECT_S, Reach
from trireme_shared.collective.records import Epoch, EpochMember, Mirror
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

KEYS = Keys("job")
TTL_S = 3.0


def named(name: str) -> EpochMember:
    return EpochMember(member=name, incarnation=f"of {name}")


def epoch_of(*names: str) -> Epoch:
    return Epoch(members=tuple(map(named, names)))


class Process:
    """A member's part in the decisions, with an etcd client of its own. `dead`: others can prove it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.etcd = Etcd(world.etcd.transport(name))
        self.mirror = Mirror(self.etcd, KEYS.collective)
        self.record = CommunicatorMember(
            member=name, incarnation=f"of {name}", host="h", pid=1, address=f"{name}:1"
        )
        self.own = OwnKey(self.etcd, self.record)
        self.dead = asyncio.Event()
        self.reach = Reach(
            self.etcd,
            KEYS,
            self.mirror,
            lambda: self.own,
            named(name),
            TTL_S,
            lambda: world.stuck_s,
            self._reaches,
        )

    async def live(self) -> None:
        assert await self.own.claim(KEYS.collective_member(self.name), TTL_S)
        one = Decider(
            self.etcd, KEYS, self.mirror, lambda: self.own, self.world.minimum, self.world.proved_dead
        )
        async with asyncio.TaskGroup() as group:
            for part in (self._hold(), self.mirror.follow(), one.run(), self.reach.run()):
                group.create_task(part)

    async def _hold(self) -> None:
        """As Background does."""
        while True:
            await self.own.hold()
            self.own = OwnKey(self.etcd, self.record)
            await asyncio.sleep(0.1)
            await self.reach.everybody()
            assert await self.own.claim(KEYS.collective_member(self.name), TTL_S)

    async def _reaches(self, member: CommunicatorMember) -> bool:
        way = self.name + member.member
        await asyncio.sleep(CONNECT_S if way in self.world.closed else 0.001)
        return way not in self.world.closed


class World:
    """`closed`: ways on which nothing is delivered, "ab" from a to b. `stuck_s`: for how long every epoch has
    made no progress."""

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum
        self.closed: set[str] = set()
        self.stuck_s = 0.0
        self.etcd = SimulatedEtcd()
        self.observer = Etcd(self.etcd.transport("observer"))
        self.processes: dict[str, tuple[Process, asyncio.Task]] = {}
        self.ids: list[int] = []

    async def proved_dead(self, member: CommunicatorMember) -> None:
        await self.processes[member.member][0].dead.wait()

    def begin(self, group: asyncio.TaskGroup, *names: str) -> None:
        for name in names:
            process = Process(self, name)
            self.processes[name] = process, group.create_task(process.live())

    def kill(self, name: str, *, proved: bool = True) -> None:
        process, task = self.processes.pop(name) if not proved else self.processes[name]
        task.cancel()
        self.etcd.cut(name)
        if proved:
            process.dead.set()

    def end(self) -> None:
        for _, task in self.processes.values():
            task.cancel()

    async def members(self) -> str:
        found = await self.observer.get(KEYS.collective_epoch)
        if found is None:
            return ""
        if found.mod_revision not in self.ids:
            self.ids.append(found.mod_revision)
        return "".join(member.member for member in Epoch.model_validate_json(found.value).members)

    async def until(self, wanted: str, limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            while await self.members() != wanted:
                await asyncio.sleep(0.01)


def virtual(test, minimum=1, seed=3):
    @functools.wraps(test)
    def wrapped(**given):
        async def main():
            world = World(minimum)
            async with asyncio.TaskGroup() as group:
                await test(world, group, **given)
                world.end()

        run_virtual(VirtualLoop(random.Random(seed)), main(), random.Random(seed))

    del wrapped.__wrapped__
    return wrapped
