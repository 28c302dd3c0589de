"""The source's end of a migration: when a group freezes, what travels before and after, and what counts as
its pause."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import torch

from pserver_service.context import LOOK_S, OwnIndex, PserverContext
from pserver_service.handoff.sender import IDLE_S, HandOver
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from tests.pserver_service.jobs import JOB, initialised, item, layout_of, push_header, stream
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase, PserverMember, SlotMap
from trireme_shared.protocol.records.assignments import Group, Migration
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart
from trireme_shared.serving.core.moving import LeavingBlocks
from trireme_shared.serving.pserver import Pserver

ADAM = OptimizerSpec(name="Adam", defaults={"lr": 0.1}, groups=({},))
LAYOUT = layout_of(48, optimizer=ADAM)  # three blocks of 16
MOVED = (1, 2)
BLOCK_BYTES = 64
STATE_BYTES = 2 * BLOCK_BYTES + 4  # Adam's two tensors, and its step
HERE = SlotMap(version=2, owners=(0,) * LAYOUT.slot_count)


@dataclass
class Target:
    """A HandoffPort: takes everything, and keeps what it was told. `broken`: calls that fail from now on."""

    calls: list[tuple[HandoffHeader, list[HandoffPart], int]] = field(default_factory=list)
    connected: int = 0
    broken: int = 0

    async def hand_over(self, header, parts) -> HandoffAnswer:
        if self.broken:
            self.broken -= 1
            raise PeerError("the connection broke")
        found = [(part, payload.nbytes) for part, payload in parts]
        self.calls.append((header, [part for part, _ in found], sum(size for _, size in found)))
        await asyncio.sleep(0)
        return HandoffAnswer(have=header.whole)

    async def close(self) -> None:
        self.connected -= 1

    @property
    def whole(self) -> HandoffHeader | None:
        return next((header for header, _, _ in self.calls if header.whole), None)


@dataclass
class Source:
    """A parameter server that has to hand the blocks MOVED over to `target`."""

    pserver: Pserver
    target: Target
    directory: Directory
    own_index: OwnIndex
    connections: int = 0

    @classmethod
    async def begun(cls) -> Source:
        pserver, _ = await initialised(LAYOUT)
        etcd = Etcd(SimulatedEtcd().transport("ps-1"))
        directory = Directory(etcd, Keys(JOB))
        members = [
            PserverMember(index=i, url=f"http://h:{i}", incarnation=f"ps-{i + 1}", host="h", pid=1)
            for i in (0, 1)
        ]
        directory.state, directory.slots, directory.layout = JobState(phase=Phase.RUNNING), HERE, LAYOUT
        directory.pservers = dict(enumerate(members))
        group = Group(number=0, source=0, target=1, slots=MOVED)
        names = {str(member.index): member.incarnation for member in members}
        directory.migration = Migration(id="op-1.1", timeline=0, groups=(group,), members=names)
        assert pserver.store is not None
        pserver.store.slots = HERE
        return cls(pserver, Target(), directory, OwnIndex(etcd, directory, members[0]))

    def connect(self, _: PserverMember) -> Target:
        self.connections += 1
        self.target.connected += 1
        return self.target

    def handing_over(self) -> asyncio.Task[None]:
        context = PserverContext(
            Etcd(SimulatedEtcd().transport("x")),
            self.directory,
            self.pserver,
            self.own_index,
            _inline,
            self.connect,
        )
        return asyncio.create_task(HandOver(context).run())

    async def step(self, number: int, blocks=(0, 1, 2)) -> list[str]:
        """What was refused, by code."""
        pushed = (item(block, torch.full((16,), 1.0 + number)) for block in blocks)
        return [
            refusal.code
            for refusal in (await self.pserver.push(push_header(number), stream(*pushed))).refused
        ]

    async def moved(self) -> None:
        """The leader writes the map; the source forgets the group."""
        await until(
            lambda: self.own_index.record.handed is not None and 0 in self.own_index.record.handed.groups
        )
        assert self.pserver.store is not None
        owners = tuple(1 if slot in MOVED else 0 for slot in range(LAYOUT.slot_count))
        self.pserver.store.slots = HERE.model_copy(update={"version": 3, "owners": owners})
        self.directory.revision += 1
        await until(
            lambda: self.own_index.record.handed is not None and self.own_index.record.handed.forgotten == 1
        )


async def _inline(work, *arguments):
    return work(*arguments)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def played(scenario: Callable[[Source], Awaitable[None]]) -> Source:
    found: list[Source] = []

    async def main() -> None:
        source = await Source.begun()
        found.append(source)
        await scenario(source)

    rng = random.Random(3)
    run_virtual(VirtualLoop(rng), main(), rng)
    return found[0]


async def in_mid_step(source: Source) -> None:
    """The migration is seen when one block of the group has made step 0, and the other one has not."""
    await source.step(0, (0, 1))
    handing = source.handing_over()
    await asyncio.sleep(3 * IDLE_S)
    assert source.target.whole is None
    await source.step(0, (2,))
    await asyncio.sleep(0.1)
    assert await source.step(1) == []
    await until(lambda: source.target.whole is not None)
    handing.cancel()


def test_all_blocks_of_a_group_freeze_in_the_same_step_also_if_its_turn_comes_in_the_middle_of_one():
    whole = played(in_mid_step).target.whole
    assert whole is not None
    assert {moved.version for moved in whole.blocks} == {2}


def test_without_waiting_for_the_end_of_the_step_a_group_would_stay_frozen_for_a_whole_step():
    async def main() -> None:
        source = await Source.begun()
        await source.step(0, (0, 1))
        handing = source.handing_over()
        await asyncio.sleep(0.1)
        await source.step(0, (2,))
        await asyncio.sleep(0.1)
        refused = await source.step(1)
        handing.cancel()
        assert refused == ["MOVING"]

    rng = random.Random(3)
    with replaced(LeavingBlocks, "even", True):
        run_virtual(VirtualLoop(rng), main(), rng)


def test_only_what_the_step_has_changed_travels_after_the_freeze():
    async def scenario(source: Source) -> None:
        await source.step(0)
        handing = source.handing_over()
        await until(lambda: len(source.target.calls) == 2)
        await source.step(1)
        await until(lambda: source.target.whole is not None)
        handing.cancel()

    (asked, none, empty), (_, early, before), (_, rest, after) = played(scenario).target.calls
    assert (none, empty) == ([], 0)
    assert (before, after) == (2 * BLOCK_BYTES, 2 * (BLOCK_BYTES + STATE_BYTES))
    assert {(part.block, part.name, part.version) for part in early} == {(1, "", 1), (2, "", 1)}
    assert not {part.version for part in rest if not part.name} - {2}
    # the target was told of all that memory while everything was served
    assert sorted((part.block, part.name) for part in asked.coming) == sorted(
        (part.block, part.name) for part in (*early, *rest)
    )


@pytest.mark.parametrize("meets", [False, True])
def test_a_pause_is_what_pushes_waited_and_a_freeze_that_no_push_met_is_none(meets):
    async def scenario(source: Source) -> None:
        handing = source.handing_over()
        await until(lambda: len(source.target.calls) == 2)
        await source.step(0)
        await asyncio.sleep(5.0)
        if meets:
            assert await source.step(1) == ["MOVING", "MOVING"]
            await asyncio.sleep(1.0)
        await source.moved()
        handing.cancel()

    handed = played(scenario).own_index.record.handed
    assert handed is not None
    assert 1.0 * meets <= handed.longest_pause_s <= (1.5 + LOOK_S) * meets


@pytest.mark.parametrize(("broken", "connections"), [(0, 1), (2, 3)])
def test_a_group_travels_over_one_connection_and_a_broken_one_is_replaced(broken, connections):
    async def scenario(source: Source) -> None:
        source.target.broken = broken
        handing = source.handing_over()
        await until(lambda: len(source.target.calls) == 2)
        await source.step(0)
        await source.moved()
        handing.cancel()
        await asyncio.wait([handing])

    source = played(scenario)
    assert (source.connections, source.target.connected) == (connections, 0)


@pytest.mark.parametrize("begun", [False, True])
def test_without_a_step_a_group_freezes_as_it_is_unless_one_has_begun(begun):
    async def scenario(source: Source) -> None:
        if begun:
            half = item(1, torch.ones(16), lanes=(0, 2))
            await source.pserver.push(push_header(0, range(2)), stream(half))
        handing = source.handing_over()
        await asyncio.sleep(5 * IDLE_S)
        frozen = {number: state.frozen for number, state in source.pserver.store.blocks.items()}  # type: ignore[union-attr]
        handing.cancel()
        assert frozen == {0: False, 1: not begun, 2: not begun}

    played(scenario)
