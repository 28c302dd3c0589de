"""A running master through a rollback: restored pservers, damaged checkpoints, take-overs in the middle,
other numbers."""

from __future__ import annotations

import asyncio

from master_service.leadership.master import Master
from tests.equipment.queue_violations import violations
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, done, leading, running, take
from tests.master_service.control.restoring import checkpoint, names, rolling_back, spec
from trireme_shared.platform.etcd import Etcd
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import EvaluationSums, FailTask, Phase, Stage, TaskKind, UserFailure
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.step import LanePosition


def test_a_dead_pserver_takes_the_job_back_and_it_goes_on_when_all_pservers_have_restored() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            for index in range(3):
                for lane in range(2):
                    task = await take(cluster, master, stream=lane, index=index)
                    if index < 2:
                        await master.complete_task(task.task_id, done(task, timeline=task.timeline))
            await checkpoint(cluster, 40, 30)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            waits = await master.acquire_task(cluster.ask(master, stream=0, index=1))
            assert (waits.answer, "the job goes back to step 40" in waits.reason) == ("wait", True)
            await cluster.restore(0, state)
            await asyncio.sleep(1)
            assert master.job.state == state
            await cluster.add_pserver(1)
            await cluster.restore(1, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")
            assert (master.job.state.timeline, master.job.state.generation) == (2, 3)
            assert master.job.training.cursors == {"0": 1, "1": 1}
            assert not master.job.training.pending
            again = await take(cluster, master, stream=0, index=1)
            assert (again.timeline, again.attempt) == (2, 1)
            rolled_back = next(event for event in master.events.after(0, 1000) if event.name == "rolled_back")
            assert rolled_back.fields["records_replayed"] == 20
            await cluster.add_trainer("t2")
            await until(lambda: master.job.trainers.names == ("t1", "t2"), "the newcomer")

    run_virtually(main)


def test_a_new_master_goes_on_with_the_roll_back_of_the_last_one() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as first:
            await take(cluster, first, stream=0)
            await checkpoint(
                cluster, 40, positions=[LanePosition(lane=0, index=1, offset=2), LanePosition(lane=1)]
            )
            await until(lambda: first.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-0")
            state = await rolling_back(first, "at-40")
        await cluster.restore(1, state)
        async with leading(cluster.master("m2")) as second:
            await asyncio.sleep(1)
            assert second.job.state == state
            await cluster.add_pserver(0)
            await cluster.restore(0, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")
            assert second.job.training.cursors == {"0": 2}
            requeued = second.job.training.requeued.values()
            assert [(task.stream, task.index) for task in requeued] == [("0", 1)]
        async with leading(cluster.master("m3")) as third:
            assert third.job.training.cursors == {"0": 2}
            assert list(violations(third.job.training)) == []

    run_virtually(main)


def test_a_new_master_that_finds_pservers_missing_decides_the_same() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1"):
            await checkpoint(cluster, 40)
        await cluster.lose("pserver-0")
        await cluster.lose("pserver-1")
        await cluster.lose("t1")
        async with leading(cluster.master("m2")) as second:
            state = await rolling_back(second, "at-40")
            for index in range(2):
                await cluster.add_pserver(index)
                await cluster.restore(index, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")
            assert second.job.state.reason == "back at step 40; waiting for a trainer"
            await cluster.add_trainer("t2")
            await until(lambda: second.job.trainers.lanes_of("t2") == (0, 2), "lanes of the newcomer")

    run_virtually(main)


def test_damage_is_answered_by_the_checkpoint_before_and_by_failing_when_none_is_left() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30, 20)
            cluster.storage.manifests["at-40"] = CheckpointUnusable("the manifest was edited")
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-30")
            await cluster.add_pserver(1)
            await cluster.restore(1, state, error="its part is truncated")
            state = await rolling_back(master, "at-20")
            warnings = [
                event.message for event in master.events.after(0, 1000) if event.name == "checkpoint_unusable"
            ]
            assert warnings == ["the manifest was edited", "pserver-1: its part is truncated"]
            await cluster.restore(0, state, error="gone")
            await until(lambda: master.job.state.phase is Phase.FAILED, "the job to fail")
            assert "no checkpoint is left" in master.job.state.reason
            assert "pserver-0: gone" in master.job.state.reason

    run_virtually(main)


def test_a_failing_storage_is_read_again() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            whole, cluster.storage.manifests["at-40"] = cluster.storage.manifests["at-40"], OSError("away")
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(0.6)
            cluster.storage.manifests["at-40"] = whole
            await cluster.add_pserver(1)
            for index in range(2):
                await cluster.restore(index, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")

    run_virtually(main)


def test_a_storage_that_is_not_reached_is_waited_for_and_reported_once() -> None:
    """However long it takes: the checkpoint before is in the same place."""

    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40, 30)
            manifests = dict(cluster.storage.manifests)
            cluster.storage.manifests.update(
                dict.fromkeys(manifests, ConnectionError("no answer from http://s3"))
            )
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(300.0)
            assert master.job.state == state
            told = [event.message for event in master.events.after(0, 1000) if event.name == "storage_away"]
            assert told == [
                "the job waits for its storage to go back to a checkpoint: no answer from http://s3"
            ]
            cluster.storage.manifests.update(manifests)
            await cluster.add_pserver(1)
            for index in range(2):
                await cluster.restore(index, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")

    run_virtually(main)


def test_a_job_resumed_with_another_number_of_pservers_gets_a_new_slot_map() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1"):
            await checkpoint(cluster, 40)
        cluster.spec = spec(pservers=3, trainers=5)
        async with leading(cluster.master("m2")) as second:
            state = await rolling_back(second, "at-40")
            assert second.job.slots is not None
            assert (second.job.slots.version, set(second.job.slots.owners)) == (2, {0, 1, 2})
            desired = await cluster.etcd.get(KEYS.pservers_desired)
            assert desired is not None
            assert desired.value == b"3"
            await cluster.add_pserver(2)
            for index in range(3):
                await cluster.restore(index, state)
            await until(lambda: second.job.state.phase is Phase.RUNNING, "the job to run again")

    run_virtually(main)


def test_without_a_checkpoint_all_pservers_leave_and_the_job_starts_over() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await take(cluster, master, stream=0)
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.phase is Phase.WAITING, "the job to begin again")
            assert await Etcd(cluster.simulated.transport("look")).get(KEYS.pserver(0)) is None
            assert (await cluster.etcd.get(KEYS.layout), await cluster.etcd.get(KEYS.init_done)) == (
                None,
                None,
            )
            assert (master.job.training.cursors, master.job.training.pending) == ({}, {})
            assert "started_over" in names(master)
            for index in range(2):
                await cluster.add_pserver(index)
            await asyncio.sleep(1)
            assert master.job.state.phase is Phase.WAITING
            await cluster.etcd.put(KEYS.layout, b"{}")
            await cluster.etcd.put(KEYS.init_done, b"done")
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run")
            assert master.job.state.timeline == 2

    run_virtually(main)


def test_a_job_that_starts_over_forgets_its_evaluation() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(evaluation_dataset=TextLines("test.txt")), Storage(4))
        async with running(cluster, "t1", "t2") as master:
            for index in range(2):
                for lane in range(2):
                    trainer = f"t{lane + 1}"
                    task = await take(cluster, master, trainer, stream=lane, index=index)
                    await master.complete_task(task.task_id, done(task, trainer, timeline=task.timeline))
            await until(lambda: master.job.state.stage is Stage.EVALUATE, "the evaluation")
            first = await take(cluster, master)
            await master.complete_task(first.task_id, done(first, sums={"seen": 10.0}))
            await take(cluster, master)
            refused = await take(cluster, master, "t2")
            report = FailTask(
                trainer="t2", attempt=1, failure=UserFailure(error_type="ValueError", message="no")
            )
            await master.fail_task(refused.task_id, report)
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.phase is Phase.WAITING, "the job to begin again")
            forgotten(master)
        async with leading(cluster.master("m2")) as second:
            forgotten(second)
            found = await cluster.etcd.range(KEYS.tasks, prefix=True)
            assert [kv.key for kv in found.kvs if "evaluate" in kv.key] == []

    run_virtually(main)


def forgotten(master: Master) -> None:
    queue = master.job.queues[TaskKind.EVALUATE]
    assert (queue.counts, queue.cursors, queue.pending, queue.requeued) == ((4, 0, 0, 0), {}, {}, {})
    assert list(violations(queue)) == []
    assert master.job.sums == EvaluationSums()
