"""Pushes and pulls of blocks that move to another parameter server: they wait for the slot map, and for
nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.trainer_agent.virtual_time import virtually
from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.data_plane.pushes import Outbox, Verdict
from trainer_agent.data_plane.step_exchange import ParameterServers
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Mode, PserverMember, SlotMap
from trireme_shared.protocol.records.assignments import Group, Migration
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import (
    PulledBlock,
    PullEnd,
    PushAnswer,
    PushBlock,
    PushHeader,
    Refusal,
)

KEYS = Keys("j")
HEADER = PushHeader(job="j", term=0, generation=0, mode=Mode.SYNC, trainer="t", step=0)
BEFORE, AFTER = SlotMap(version=1, owners=(0,)), SlotMap(version=2, owners=(1,))
MIGRATION = Migration(
    id="op.1", timeline=0, groups=(Group(number=0, source=0, target=1, slots=(0,)),), members={}
)
LATE_S = 0.02  # so much later than the trainer the new owner learns of the slot map


class Pserver:
    """Has the only block as soon as `serves`. `frozen`: it is on its way. `asked`: when it was pushed to or
    pulled from."""

    def __init__(self, *, serves=False, frozen=False):
        self.serves, self.frozen = serves, frozen
        self.asked = []

    async def push(self, _, blocks):
        self.asked.append(clock.monotonic())
        count = len([each async for each in blocks])
        if self.serves and not self.frozen:
            return PushAnswer(applied=count, generation=0)
        code = "MOVING" if self.frozen else "WRONG_OWNER"
        return PushAnswer(refused=(Refusal(block=0, lanes=(0, 1), code=code, version=0),), generation=0)

    async def pull(self, _, sink, placed):
        self.asked.append(clock.monotonic())
        if not self.serves:
            return PullEnd(code="WRONG_OWNER", message="block 0 is not here")
        sink(PulledBlock(block=0))
        placed(PulledBlock(block=0))
        return PullEnd(code="OK", record=StepRecord(version=1, positions=()))


class World:
    """Two parameter servers, and a trainer that follows etcd."""

    def __init__(self, *pservers):
        self.pservers = pservers
        simulated = SimulatedEtcd()
        self.leader = Etcd(simulated.transport("leader"))
        self.directory = Directory(Etcd(simulated.transport("trainer")), KEYS)
        layout = SimpleNamespace(
            payloads=lambda _: {}, blocks=lambda: [SimpleNamespace(number=0)], slot_count=1, tables=()
        )
        vectors = SimpleNamespace(layout=layout, staging=lambda _: memoryview(bytearray(4)))
        fleet = FleetClient(
            self.directory, lambda member: pservers[member.index], vectors.layout, lambda *_: None
        )
        self.servers = ParameterServers(fleet, vectors)

    async def begin(self):
        for index in range(len(self.pservers)):
            member = PserverMember(
                index=index, url=f"http://h:{index}", incarnation=f"ps-{index}", host="h", pid=1
            )
            await self.leader.put(KEYS.pserver(index), member.to_bytes())
        await self.leader.put(KEYS.slots, BEFORE.to_bytes())
        await self.leader.put(KEYS.migration, MIGRATION.to_bytes())
        await self.directory.wait_for(lambda seen: seen.migration is not None, 10.0, "the migration")

    async def push(self):
        outbox = Outbox()
        outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
        outbox.close()
        return await self.servers.pushes.push(0, HEADER, outbox)


def played(world_of, scenario):
    """How many seconds the trainer needed after `scenario` let it go on, and the world."""

    async def main():
        world = world_of()
        following = asyncio.create_task(world.directory.run())
        await world.begin()
        seconds = await scenario(world)
        following.cancel()
        await asyncio.wait([following])
        return seconds, world

    return virtually(main)


async def pushed(world, go_on):
    pushing = asyncio.create_task(world.push())
    await go_on(world)
    began = clock.monotonic()
    assert await pushing is Verdict.ACKNOWLEDGED
    return clock.monotonic() - began


async def new_map_first_here(world):
    """The trainer has the map that gives the block to pserver-1 before pserver-1 has it."""
    await world.leader.put(KEYS.slots, AFTER.to_bytes())
    await world.directory.wait_for(lambda seen: seen.slots == AFTER, 10.0, "the map")
    asyncio.get_running_loop().call_later(LATE_S, setattr, world.pservers[1], "serves", True)


async def new_map_later(world):
    await asyncio.sleep(0.9)
    world.pservers[1].serves = True
    await world.leader.put(KEYS.slots, AFTER.to_bytes())


async def migration_ends(world):
    """The block stays; the source has heard of it."""
    await asyncio.sleep(0.9)
    world.pservers[0].frozen = False
    await world.leader.delete(KEYS.migration)


def test_a_push_is_repeated_within_milliseconds_to_a_new_owner_that_learns_of_the_slot_map_late():
    seconds, _ = played(lambda: World(Pserver(), Pserver()), lambda world: pushed(world, new_map_first_here))
    assert seconds < 4 * LATE_S


def test_a_pull_is_repeated_within_milliseconds_to_a_new_owner_that_learns_of_the_slot_map_late():
    async def scenario(world):
        await new_map_first_here(world)
        began = clock.monotonic()
        await world.servers.pull(1)
        return clock.monotonic() - began

    seconds, _ = played(lambda: World(Pserver(), Pserver()), scenario)
    assert seconds < 4 * LATE_S


@pytest.mark.parametrize(("go_on", "asked"), [(new_map_later, (1, 1)), (migration_ends, (2, 0))])
def test_a_frozen_block_is_pushed_again_at_once_when_map_or_migration_change_and_not_before(go_on, asked):
    def world():
        return World(Pserver(serves=True, frozen=True), Pserver())

    seconds, after = played(world, lambda it: pushed(it, go_on))
    assert tuple(len(pserver.asked) for pserver in after.pservers) == asked
    assert seconds < 0.05
