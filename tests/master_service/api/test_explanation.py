"""`GET /v1/job/explanation`: each situation is brought about in a running master, and must be the first cause
that is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.explained import (
    LONG_S,
    also,
    codes,
    explained,
    failure,
    in_job,
    progressed,
    text,
    waiting,
)
from tests.master_service.cluster import KEYS, MasterCluster, Storage, done, leading, running, spec_of, take
from tests.master_service.control.restoring import checkpoint, rolling_back
from tests.master_service.control.restoring import spec as spec_with_checkpoints
from trireme_shared.protocol.errors import LayoutMismatch, StorageUnreachable
from trireme_shared.protocol.records import (
    CompleteTask,
    FailTask,
    Phase,
    Restored,
)
from trireme_shared.protocol.records.tasks import TaskProgress


def test_no_parameter_server_is_there() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await asyncio.sleep(7)
        told = await explained(master)
        assert codes(told)[:2] == ["NO_PARAMETER_SERVER", "NO_TRAINER"]
        assert "0 of 2 are registered; missing: pserver-0, pserver-1" in text(told)
        assert "TRIREME_JOB=j TRIREME_ETCD=URL python -m pserver_service (2 of them)" in told["hints"]
        assert "waited for 7 s" in text(also(told, "NO_TRAINER"))

    waiting(script, pservers=2)


def test_fewer_parameter_servers_than_wanted() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await cluster.add_pserver(1)
        await cluster.add_trainer("t1")
        await until(lambda: master.job.members.trainers and master.job.members.pservers, "the members")
        told = await explained(master)
        assert codes(told)[0] == "FEWER_PARAMETER_SERVERS"
        assert told["summary"] == "The job waits for 2 of its 3 parameter servers."
        assert "missing: pserver-0, pserver-2" in text(told)

    waiting(script, pservers=3)


def test_no_trainer_is_there() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await cluster.add_pserver(0)
        await until(lambda: master.job.members.pservers, "the pserver")
        told = await explained(master)
        assert codes(told)[:2] == ["NO_TRAINER", "INITIALISING_PARAMETERS"]
        assert "0 of 2 wanted trainers are there" in text(told)
        assert "TRIREME_JOB=j TRIREME_ETCD=URL python -m trainer_agent" in told["hints"]

    waiting(script)


def test_parameters_are_initialised_and_by_whom() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await cluster.add_pserver(0)
        await cluster.add_trainer("t1")
        await until(lambda: master.job.members.trainers, "the trainer")
        told = await explained(master)
        assert told["code"] == "INITIALISING_PARAMETERS"
        assert "no trainer has begun" in told["summary"]
        await cluster.etcd.put(KEYS.init_lock, b"t1")
        told = await explained(master)
        assert told["code"] == "INITIALISING_PARAMETERS"
        assert told["summary"] == "t1 gives the parameter servers their first values."

    waiting(script)


class SlowStorage(Storage):
    def __init__(self) -> None:
        super().__init__()
        self.counting = asyncio.Event()

    async def count(self, source: Any, sizes: TaskSizes) -> FileTable:
        await self.counting.wait()
        return await super().count(source, sizes)


def test_the_dataset_is_being_counted() -> None:
    async def main() -> None:
        storage = SlowStorage()
        cluster = MasterCluster(spec_of(), storage)
        master, stopping = cluster.master(), asyncio.Event()
        serving = asyncio.ensure_future(master.run(stopping))
        await asyncio.sleep(20)
        told = await explained(master)
        assert codes(told) == ["COUNTING_DATASET"]
        assert "for 20 s" in told["summary"]
        assert "train.txt" in text(told)
        storage.counting.set()
        await until(lambda: master.current_term, "the master to lead")
        assert (await explained(master))["code"] == "NO_PARAMETER_SERVER"
        stopping.set()
        await serving

    run_virtually(main)


class SlowTable(Storage):
    async def load_table(self, digest: str) -> FileTable:
        await asyncio.sleep(30)
        return await super().load_table(digest)


def test_a_master_takes_over_and_a_standby_does_not_explain() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage())
        async with leading(cluster.master()) as first:
            second, stopping = cluster.master("m2"), asyncio.Event()
            serving = asyncio.ensure_future(second.run(stopping))
            await asyncio.sleep(1)
            async with client_of(second) as client:
                check_problem(await client.get("/v1/job/explanation"), 503, "NOT_LEADER")
            assert (await explained(first))["code"] == "NO_PARAMETER_SERVER"
            cluster.storage = SlowTable()
        await asyncio.sleep(5)
        told = await explained(second)
        assert codes(told) == ["MASTER_TAKING_OVER"]
        assert "m2" in told["summary"]
        await asyncio.sleep(40)
        assert (await explained(second))["code"] == "NO_PARAMETER_SERVER"
        stopping.set()
        await serving

    run_virtually(main)


class LostTable(Storage):
    async def load_table(self, digest: str) -> FileTable:
        raise StorageUnreachable("s3://bucket does not answer", hint="check the network")


def test_no_master_can_take_over_without_the_storage() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage())
        async with leading(cluster.master()):
            pass
        cluster.storage = LostTable()
        master, stopping = cluster.master("m2"), asyncio.Event()
        serving = asyncio.ensure_future(master.run(stopping))
        await asyncio.sleep(5)
        told = await explained(master)
        assert codes(told) == ["STORAGE_UNREACHABLE"]
        assert "s3://bucket does not answer" in text(told)
        assert told["hints"][0] == "check the network"
        stopping.set()
        await serving

    run_virtually(main)


# ------------------------------------------------------------------ refusals and users' code


def test_a_trainer_whose_model_differs_is_refused() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await cluster.add_trainer("t2")
        await until(lambda: "t2" in master.job.members.trainers, "t2")
        await master.report_failure(
            "t2", failure(LayoutMismatch.code, "this trainer's model is not the job's")
        )
        await cluster.lose("t2")
        await until(lambda: "t2" not in master.job.members.trainers, "t2 to be gone")
        await progressed(master)
        told = await explained(master)
        assert codes(told)[:2] == ["PROGRESS_IS_FINE", "TRAINER_REFUSED"]
        refused = also(told, "TRAINER_REFUSED")
        assert "t2 came and may not join" in refused["summary"]
        assert "0 of max_user_failures 3" in text(refused), "t1 trains"
        await cluster.lose("t1")
        await until(lambda: not master.job.members.trainers, "t1 to be gone")
        assert codes(await explained(master))[:2] == ["TRAINER_REFUSED", "NO_TRAINER"]

    in_job(script)


def test_lanes_wait_for_a_trainer_that_was_refused_or_does_not_begin() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert (told["code"], "No trainer has asked for a task yet" in told["summary"]) == (
            "LANES_NOT_STARTED",
            True,
        )
        assert "They must reach each other and the master at " in text(told)
        assert "TRIREME_ADVERTISE" in told["hints"][-1]
        for lane in (0, 1):
            await take(cluster, master, "t1", stream=lane)
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert told["code"] == "LANES_NOT_STARTED"
        assert "t2 owns lanes 2, 3" in text(told)
        await master.report_failure("t2", failure(LayoutMismatch.code))
        assert "t2 reported LAYOUT_MISMATCH: shape [3] is not [4]" in text(await explained(master))
        for lane in (2, 3):
            await take(cluster, master, "t2", stream=lane)
        assert "LANES_NOT_STARTED" not in codes(await explained(master))

    in_job(script, "t1", "t2", mode="sync")


def test_the_script_cannot_start() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await cluster.add_pserver(0)
        await cluster.etcd.put(KEYS.starting("t1"), b"failed")
        await master.report_failure("t1", failure("ValueError", "no such layer", "t1"))
        told = await explained(master)
        assert codes(told)[:2] == ["USER_CODE_FAILS", "NO_TRAINER"]
        assert "ValueError: no such layer" in told["summary"]

    waiting(script)


def test_the_script_fails_on_a_task_again_and_again() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await progressed(master, 1)  # before the first step the same error twice would end the job
        for _ in range(2):
            await asyncio.sleep(2)
            task = await take(cluster, master)
            report = FailTask(
                trainer="t1", attempt=task.attempt, failure=failure("KeyError", "'pixels'", "t1")
            )
            await master.fail_task(task.task_id, report)
        told = await explained(master)
        assert told["code"] == "USER_CODE_FAILS"
        assert "failed 2 of 4 times: KeyError: 'pixels'" in text(told)
        again = await take(cluster, master)
        assert again.task_id == task.task_id
        assert "failed 2 of 4 times: KeyError: 'pixels'" in text(await explained(master)), (
            "also while it is tried again"
        )

    in_job(script, max_task_failures=4, max_user_failures=9)


def test_a_discarded_task_is_told_beside_the_progress() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        await progressed(master)
        task = await take(cluster, master)
        await master.fail_task(
            task.task_id, FailTask(trainer="t1", attempt=1, failure=failure("KeyError", "'pixels'", "t1"))
        )
        told = await explained(master)
        assert codes(told)[:2] == ["PROGRESS_IS_FINE", "TASK_DISCARDED"]
        assert "10 of 100 records of this epoch" in text(also(told, "TASK_DISCARDED"))
        assert "KeyError" in text(also(told, "TASK_DISCARDED"))

    in_job(script, max_task_failures=1)


# ------------------------------------------------------------------ few tasks, few lanes, the end


def test_trainers_wait_for_the_last_tasks() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        task = await take(cluster, master, "t1")
        await take(cluster, master, "t2")
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert told["code"] == "LATE_TASKS"
        assert told["summary"] == "All 2 tasks of this epoch are taken; 1 of 3 trainers wait for the last 2."
        assert "There are 2 TRAIN tasks for 3 trainers" in text(told)
        await master.complete_task(task.task_id, done(task, "t1"))
        told = await explained(master)
        assert codes(told)[:2] == ["PROGRESS_IS_FINE", "LATE_TASKS"]

    in_job(script, "t1", "t2", "t3", storage=Storage(tasks=2), trainers=3)


def test_a_wait_for_a_slower_trainer_is_told_before_the_late_tasks() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        task = await take(cluster, master, "t1")
        await take(cluster, master, "t2")
        told_by_t1 = "t2 computes with parameters 3 pushes old, and max_staleness is 2"
        report = TaskProgress(trainer="t1", attempt=1, minibatches=1, waits_for=told_by_t1)
        await master.report_progress(task.task_id, report)
        assert codes(await explained(master))[:3] == [
            "PROGRESS_IS_FINE",
            "SLOWER_TRAINER_AWAITED",
            "LATE_TASKS",
        ]
        await asyncio.sleep(LONG_S)
        told = await explained(master)
        assert codes(told)[:2] == ["SLOWER_TRAINER_AWAITED", "LATE_TASKS"]
        assert f"t1: {told_by_t1}." in told["details"]
        await master.report_progress(task.task_id, TaskProgress(trainer="t1", attempt=1, minibatches=2))
        await asyncio.sleep(LONG_S)
        assert codes(await explained(master))[0] == "LATE_TASKS", "nobody waits any more"

    in_job(script, "t1", "t2", "t3", mode="async", storage=Storage(tasks=2), trainers=3, max_staleness=2)


def test_more_trainers_than_lanes() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        told = await explained(master)
        assert "2 trainers share 1 lanes: 1 has nothing to compute." in [
            cause["summary"] for cause in told["also"]
        ]

    in_job(script, "t1", "t2", mode="sync", lanes=1)


def test_a_completed_job_says_so() -> None:
    async def script(cluster: MasterCluster, master: Master) -> None:
        while (answer := await master.acquire_task(cluster.ask(master))).task is not None:
            report = CompleteTask(trainer="t1", attempt=answer.task.attempt, exports={"torch": "/m.pt"})
            await master.complete_task(answer.task.task_id, report)
        told = await explained(master)
        assert codes(told) == ["JOB_COMPLETED"]
        assert "The model (torch) is /m.pt." in told["details"]
        assert "100 records were trained" in text(told)

    in_job(script)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_failed_job_says_why_and_whether_it_can_be_resumed(with_checkpoint: bool) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_with_checkpoints(recovery_timeout_s=2.0))
        async with running(cluster, "t1") as master:
            if with_checkpoint:
                await checkpoint(cluster, 40)
                await until(lambda: master.job.members.latest, "the checkpoint")
                await cluster.lose("pserver-1")
                await until(lambda: master.job.state.phase is Phase.FAILED, "the job to fail")
                told = await explained(master)
                assert "The cause is MEMBERS." in told["details"]
                assert "It is resumable" in text(told)
            else:
                fatal = failure("NonFiniteLoss", "the loss is nan", "t1").model_copy(update={"fatal": True})
                await master.report_failure("t1", fatal)
                told = await explained(master)
                assert "The cause is SCRIPT." in told["details"]
                assert "It is not resumable" in text(told)
                assert "the loss is nan" in told["summary"]
            assert codes(told) == ["JOB_FAILED"]

    run_virtually(main)


def test_a_restored_parameter_server_with_an_error_fails_the_job_over_its_storage() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_with_checkpoints())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            await until(lambda: master.job.members.latest, "the checkpoint")
            await cluster.lose("pserver-1")
            state = await rolling_back(master, "at-40")
            said = Restored(timeline=state.timeline, checkpoint=state.checkpoint, error="a part is damaged")
            await cluster.add_pserver(1, said)
            await until(lambda: master.job.state.phase is Phase.FAILED, "the job to fail")
            told = await explained(master)
            assert (told["code"], "The cause is STORAGE." in told["details"]) == ("JOB_FAILED", True)
            assert "a part is damaged" in told["summary"]

    run_virtually(main)
