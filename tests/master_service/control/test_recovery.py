"""A running master through a roll-back: restored pservers, damaged checkpoints, take-overs in the middle, other numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from master_service.leadership.master import Master
from shared.errors import CheckpointUnusable
from shared.etcd import Etcd
from shared.records import JobState, Mode, Phase, SlotMap
from shared.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest
from shared.records.layout import Layout, OptimizerSpec
from shared.records.step import LanePosition, StepRecord
from tests.master_service.worlds import (
    KEYS,
    World,
    done,
    leading,
    running,
    spec_of,
    take,
    until,
    virtually,
)

SLOTS = SlotMap(version=1, owners=(0, 1) * 64)
LAYOUT = Layout(
    digest="d",
    segments=(),
    block_bytes=256,
    slot_count=128,
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=()),
)


def spec(**values: Any) -> Any:
    return spec_of(
        **({"mode": Mode.SYNC, "lanes": 2, "pservers": 2, "slot_count": 128, "global_batch_size": 4} | values)
    )


async def checkpoint(world: World, *steps: int, positions: Sequence[LanePosition] = ()) -> None:
    """Finished checkpoints of these steps, the newest first."""
    refs = tuple(CheckpointRef(uuid=f"at-{step}", step=step, timeline=0, manifest="m") for step in steps)
    where = tuple(positions) or tuple(LanePosition(lane=lane, index=1) for lane in range(2))
    for ref in refs:
        world.storage.manifests[ref.uuid] = Manifest(
            job="j",
            uuid=ref.uuid,
            step=ref.step,
            timeline=0,
            term=1,
            generation=1,
            mode=Mode.SYNC,
            lanes=2,
            seed=0,
            spec_digest="",
            timestamp="",
            slots=SLOTS,
            layout=LAYOUT,
            record=StepRecord(version=ref.step, positions=where),
            parts=(),
        )
    latest = CheckpointLatest(
        uuid=refs[0].uuid, step=refs[0].step, timeline=0, term=1, timestamp="", manifest="m", slots=SLOTS, kept=refs
    )
    await world.etcd.put(KEYS.latest, latest.to_bytes())


async def rolling_back(master: Master, checkpoint: str) -> JobState:
    def due() -> bool:
        state = master.job.state
        return state.phase is Phase.ROLLING_BACK and state.checkpoint == checkpoint

    await until(due, f"a roll-back to {checkpoint}")
    return master.job.state


def names(master: Master) -> list[str]:
    return [event.name for event in master.events.after(0, 1000)]


def test_a_dead_pserver_takes_the_job_back_and_it_goes_on_when_all_pservers_have_restored() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as master:
            for index in range(3):
                for lane in range(2):
                    task = await take(world, master, stream=lane, index=index)
                    if index < 2:
                        await master.complete_task(task.task_id, done(task, timeline=task.timeline))
            await checkpoint(world, 40, 30)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await world.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            waits = await master.acquire_task(world.ask(master, stream=0, index=1))
            assert (waits.answer, "the job goes back to step 40" in waits.reason) == ("wait", True)
            await world.restore(0, state)
            await asyncio.sleep(1)
            assert master.job.state == state
            await world.add_pserver(1)
            await world.restore(1, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")
            assert (master.job.state.timeline, master.job.state.generation) == (2, 3)
            assert master.job.training.cursors == {"0": 1, "1": 1}
            assert not master.job.training.pending
            again = await take(world, master, stream=0, index=1)
            assert (again.timeline, again.attempt) == (2, 1)
            rolled_back = next(event for event in master.events.after(0, 1000) if event.name == "rolled_back")
            assert rolled_back.fields["records_replayed"] == 20
            await world.add_trainer("t2")
            await until(lambda: master.job.state.trainers == ("t1", "t2"), "the newcomer")

    virtually(main)


def test_a_new_master_goes_on_with_the_roll_back_of_the_last_one() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as first:
            await take(world, first, stream=0)
            await checkpoint(world, 40, positions=[LanePosition(lane=0, index=1, offset=2), LanePosition(lane=1)])
            await until(lambda: first.job.members.latest, "the checkpoint to be seen")
            await world.lose("pserver-0")
            state = await rolling_back(first, "at-40")
        await world.restore(1, state)
        async with leading(world.master("m2")) as second:
            await asyncio.sleep(1)
            assert second.job.state == state
            await world.add_pserver(0)
            await world.restore(0, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")
            assert second.job.training.cursors == {"0": 2}
            requeued = second.job.training.requeued.values()
            assert [(task.stream, task.index) for task in requeued] == [("0", 1)]
        async with leading(world.master("m3")) as third:
            assert third.job.training.cursors == {"0": 2}
            assert list(third.job.training.violations()) == []

    virtually(main)


def test_a_new_master_that_finds_pservers_missing_decides_the_same() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1"):
            await checkpoint(world, 40)
        await world.lose("pserver-0")
        await world.lose("pserver-1")
        await world.lose("t1")
        async with leading(world.master("m2")) as second:
            state = await rolling_back(second, "at-40")
            for index in range(2):
                await world.add_pserver(index)
                await world.restore(index, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")
            assert second.job.state.reason == "back at step 40; waiting for a trainer"
            await world.add_trainer("t2")
            await until(lambda: second.job.lanes and second.job.lanes.of("t2") == (0, 2), "lanes of the newcomer")

    virtually(main)


def test_damage_is_answered_by_the_checkpoint_before_and_by_failing_when_none_is_left() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as master:
            await checkpoint(world, 40, 30, 20)
            world.storage.manifests["at-40"] = CheckpointUnusable("the manifest was edited")
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await world.lose("pserver-1")
            state = await rolling_back(master, "at-30")
            await world.add_pserver(1)
            await world.restore(1, state, error="its part is truncated")
            state = await rolling_back(master, "at-20")
            warnings = [event.message for event in master.events.after(0, 1000) if event.name == "checkpoint_unusable"]
            assert warnings == ["the manifest was edited", "pserver 1: its part is truncated"]
            await world.restore(0, state, error="gone")
            await until(lambda: master.job.state.phase is Phase.FAILED, "the job to fail")
            assert "no checkpoint is left" in master.job.state.reason
            assert "pserver 0: gone" in master.job.state.reason

    virtually(main)


def test_a_failing_storage_is_read_again() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as master:
            await checkpoint(world, 40)
            whole, world.storage.manifests["at-40"] = world.storage.manifests["at-40"], OSError("away")
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await world.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(0.6)
            world.storage.manifests["at-40"] = whole
            await world.add_pserver(1)
            for index in range(2):
                await world.restore(index, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")

    virtually(main)


def test_a_storage_that_is_not_reached_is_waited_for_and_reported_once() -> None:
    """However long it takes: the checkpoint before is in the same place."""

    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as master:
            await checkpoint(world, 40, 30)
            manifests = dict(world.storage.manifests)
            world.storage.manifests.update(dict.fromkeys(manifests, ConnectionError("no answer from http://s3")))
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await world.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(300.0)
            assert master.job.state == state
            told = [event.message for event in master.events.after(0, 1000) if event.name == "storage_away"]
            assert told == ["the job waits for its storage to go back to a checkpoint: no answer from http://s3"]
            world.storage.manifests.update(manifests)
            await world.add_pserver(1)
            for index in range(2):
                await world.restore(index, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")

    virtually(main)


def test_a_job_resumed_with_another_number_of_pservers_gets_a_new_slot_map() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1"):
            await checkpoint(world, 40)
        world.spec = spec(pservers=3, trainers=5)
        async with leading(world.master("m2")) as second:
            state = await rolling_back(second, "at-40")
            assert second.job.slots is not None
            assert (second.job.slots.version, set(second.job.slots.owners)) == (2, {0, 1, 2})
            desired = await world.etcd.get(KEYS.pservers_desired)
            assert desired is not None
            assert desired.value == b"3"
            await world.add_pserver(2)
            for index in range(3):
                await world.restore(index, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")

    virtually(main)


def test_without_a_checkpoint_all_pservers_leave_and_the_job_starts_over() -> None:
    async def main() -> None:
        world = World(spec())
        async with running(world, "t1") as master:
            await take(world, master, stream=0)
            await world.lose("pserver-1")
            await until(lambda: master.job.state.phase is Phase.WAITING, "the job to begin again")
            assert await Etcd(world.simulated.transport("look")).get(KEYS.pserver(0)) is None
            assert (await world.etcd.get(KEYS.layout), await world.etcd.get(KEYS.init_done)) == (None, None)
            assert (master.job.training.cursors, master.job.training.pending) == ({}, {})
            assert "started_over" in names(master)
            for index in range(2):
                await world.add_pserver(index)
            await asyncio.sleep(1)
            assert master.job.state.phase is Phase.WAITING
            await world.etcd.put(KEYS.layout, b"{}")
            await world.etcd.put(KEYS.init_done, b"done")
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run")
            assert master.job.state.timeline == 2

    virtually(main)
