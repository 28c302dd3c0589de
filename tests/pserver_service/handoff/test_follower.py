"""The target's end of a migration: it makes room for a group in small pieces, while it serves others."""

from __future__ import annotations

import asyncio

import pytest

from pserver_service.context import OwnIndex, PserverContext
from pserver_service.handoff.follower import REST_S, SlotFollower, rest_s
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import JOB, initialised, item, layout_of, push_header, stream
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Phase, PserverMember, SlotMap
from trireme_shared.protocol.records.assignments import Group, Migration
from trireme_shared.protocol.wire.messages import HandoffHeader
from trireme_shared.serving.core import moving
from trireme_shared.serving.core.moving import LeavingBlocks
from trireme_shared.serving.pserver import Pserver

LAYOUT = layout_of(32)  # SGD with momentum
MOVED = (0, 1)
PIECE_BYTES = 16
PIECES = 2 * 3 * 64 // PIECE_BYTES  # of each block two versions and the momentum


async def inline(work, *arguments):
    return work(*arguments)


def target() -> tuple[SlotFollower, Directory, Pserver]:
    """A parameter server that joins by a resize: it has no store yet."""
    etcd = Etcd(SimulatedEtcd().transport("ps-2"))
    directory = Directory(etcd, Keys(JOB))
    member = PserverMember(index=1, url="http://h:1", incarnation="ps-2", host="h", pid=1)
    directory.state, directory.layout = JobState(phase=Phase.RUNNING), LAYOUT
    directory.slots = SlotMap(version=2, owners=(0,) * LAYOUT.slot_count)
    group = Group(number=0, source=0, target=1, slots=MOVED)
    directory.migration = Migration(
        id="op-1.1", timeline=0, groups=(group,), members={"0": "ps-1", "1": "ps-2"}
    )
    pserver = Pserver(JOB, "ps-2", index=1)
    context = PserverContext(etcd, directory, pserver, OwnIndex(etcd, directory, member), inline)
    return SlotFollower(context), directory, pserver


async def asked() -> HandoffHeader:
    """What the source says first."""
    source, _ = await initialised(LAYOUT)
    pushed = (item(block, 1.0 + source.store.blocks[block].current.tensor) for block in MOVED)  # type: ignore[union-attr]
    await source.push(push_header(0), stream(*pushed))
    assert source.store is not None
    coming = LeavingBlocks(source.store, MOVED).coming()
    return HandoffHeader(
        job=JOB, generation=0, migration="op-1.1", group=0, source=0, timeline=0, coming=coming
    )


async def turns_until(task: asyncio.Task) -> int:
    """How often others had their turn before the task ended."""
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


def test_room_for_a_group_is_made_in_pieces_between_which_others_have_their_turn():
    async def main() -> None:
        follower, _, _ = target()
        header = await asked()
        first, repeated = [
            await turns_until(asyncio.create_task(follower.take(header, stream()))) for _ in range(2)
        ]
        assert first >= PIECES
        assert repeated < PIECES / 2  # there is nothing left to do

    with replaced(moving, "TOUCHED_BYTES", PIECE_BYTES):
        asyncio.run(main())


def test_room_that_is_being_made_for_a_migration_that_ends_is_given_back():
    async def main() -> None:
        follower, directory, pserver = target()
        pool = BufferPool()
        pserver.new_pool = lambda: pool  # type: ignore[method-assign]
        taking = asyncio.create_task(follower.take(await asked(), stream()))
        for _ in range(3):
            await asyncio.sleep(0)
        directory.migration = None
        follower.follow()
        with pytest.raises(NotReady, match="is over"):
            await taking
        assert pool.free_bytes == pool.allocated_bytes > 0

    with replaced(moving, "TOUCHED_BYTES", PIECE_BYTES):
        asyncio.run(main())


def test_work_that_nobody_waits_for_leaves_three_quarters_of_the_time_to_others_within_a_limit():
    assert rest_s(0.004) == pytest.approx(0.012)
    assert rest_s(5.0) == REST_S
    assert 32 * REST_S < 1.0
