"""The master below REST on a simulated etcd: whole jobs, deaths, failures, suspects."""

from __future__ import annotations

import asyncio

import pytest

from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import (
    KEYS,
    MasterCluster,
    Storage,
    done,
    finish_training,
    leading,
    running,
    spec_of,
    take,
)
from trireme_shared.protocol.errors import DatasetError, NotFound, StaleAttempt, StaleGeneration
from trireme_shared.protocol.records import (
    FailTask,
    JobState,
    MetricBatch,
    Mode,
    Phase,
    Stage,
    StepMetrics,
    TaskAnswer,
    TaskProgress,
    UserFailure,
)
from trireme_shared.protocol.records.datasets import TextLines

NO = UserFailure(error_type="ValueError", message="no")


# ------------------------------------------------------------------ whole jobs


def test_an_asynchronous_job_goes_through_all_its_stages() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(epochs=2, evaluation_dataset=TextLines("test.txt")))
        async with running(cluster, "t1") as master:
            finished = await finish_training(cluster, master)
            assert finished == {f"{epoch}/{task}" for epoch in range(2) for task in range(10)}
            while master.job.state.stage is Stage.EVALUATE:
                task = await take(cluster, master)
                await master.complete_task(
                    task.task_id, done(task, sums={"right": 9.0, "seen": float(task.count)})
                )
                await master.complete_task(
                    task.task_id, done(task, sums={"right": 9.0, "seen": float(task.count)})
                )
            task = await take(cluster, master)
            assert task.task_id == "export-0"
            await master.complete_task(task.task_id, done(task, exports={"safetensors": "model.safetensors"}))
            assert (await master.acquire_task(cluster.ask(master))).answer == "end"
            state = master.job.state
            assert (state.phase, state.stage) == (Phase.COMPLETED, Stage.DONE)
            assert state.result.metrics == {"right": 90.0, "seen": 100.0}
            assert state.result.exports == {"safetensors": "model.safetensors"}
            assert (state.result.trained_records, state.result.discarded_records) == (200, 0)
            stored = await cluster.etcd.get(KEYS.state)
            assert stored is not None
            assert JobState.model_validate_json(stored.value) == state
            names = [event.name for event in master.events.after(0, 100)]
            assert names[-5:] == [
                "epoch_done",
                "epoch_done",
                "stage_changed",
                "stage_changed",
                "job_completed",
            ]

    run_virtually(main)


def test_a_synchronous_job_walks_its_lanes() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode=Mode.SYNC, epochs=2, lanes=2))
        async with running(cluster, "t1", "t2") as master:
            owners = {0: "t1", 1: "t2"}
            for epoch in range(2):
                for lane, owner in owners.items():
                    for index in range(5):
                        await take(cluster, master, owner, stream=lane, epoch=epoch, index=index)
                    ended = await master.acquire_task(
                        cluster.ask(master, owner, stream=lane, epoch=epoch, index=5)
                    )
                    assert ended == TaskAnswer(answer="exhausted", stream_length=5)
            ask = cluster.ask(master, "t1", stream=0, epoch=2)
            assert (await master.acquire_task(ask)).answer == "end"
            assert master.job.state.stage is Stage.EXPORT
            with pytest.raises(StaleGeneration, match="lane 1 is not of t1"):
                master.job.state = master.job.state.model_copy(update={"stage": Stage.TRAIN})
                await master.acquire_task(cluster.ask(master, "t1", stream=1, epoch=1))
            master.job.state = master.job.state.model_copy(update={"stage": Stage.EXPORT})

    run_virtually(main)


def test_trainers_of_another_generation_get_nothing() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode=Mode.SYNC, lanes=2))
        async with running(cluster, "t1") as master:
            old = cluster.ask(master, "t1", stream=0)
            await cluster.add_trainer("t2")
            await until(lambda: master.job.state.generation == 2, "generation 2")
            with pytest.raises(StaleGeneration, match="t1 asks in generation 1, now is 2"):
                await master.acquire_task(old)
            with pytest.raises(StaleGeneration, match="nobody is no member of generation 2"):
                await master.acquire_task(cluster.ask(master, "nobody"))

    run_virtually(main)


def test_state_and_trainers_of_a_generation_come_in_one_transaction() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode=Mode.SYNC, lanes=4))
        async with running(cluster, "t1") as master:
            await cluster.add_trainer("t2")
            await until(lambda: master.job.state.generation == 2, "generation 2")
            await cluster.lose("t1")
            await until(lambda: master.job.state.generation == 3, "generation 3")
            revisions = {
                key: [event.kv.mod_revision for event in cluster.simulated.events() if event.kv.key == key]
                for key in (KEYS.state, KEYS.trainer_list, KEYS.trainers_change)
            }
            assert (
                revisions[KEYS.trainer_list] == revisions[KEYS.trainers_change] == revisions[KEYS.state][-3:]
            )

    run_virtually(main)


def test_a_dead_trainers_tasks_go_back_without_a_failure() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1", "t2") as master:
            task = await take(cluster, master, "t1")
            await cluster.lose("t1")
            await until(lambda: master.job.training.requeued, "the task to go back")
            again = await take(cluster, master, "t2")
            assert (again.task_id, again.attempt) == (task.task_id, 2)
            assert master.job.training.pending[task.task_id].record.failures == 0
            with pytest.raises(StaleAttempt):
                await master.complete_task(task.task_id, done(task, "t1"))

    run_virtually(main)


def test_without_the_check_of_attempts_a_late_report_would_end_anothers_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("master_service.core.queue.task_queue.TaskQueue.check_attempt", lambda *_: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_dead_trainers_tasks_go_back_without_a_failure()


def test_a_silent_task_is_requeued_with_a_failure_and_progress_prevents_it() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(task_timeout_floor_s=5.0, task_timeout_ceiling_s=20.0))
        async with running(cluster, "t1") as master:
            lively, silent = await take(cluster, master), await take(cluster, master)
            for minibatches in range(1, 9):
                await asyncio.sleep(4)
                for task, number in ((lively, minibatches), (silent, 1)):
                    report = TaskProgress(trainer="t1", attempt=1, minibatches=number, epoch=0)
                    if task.task_id in master.job.training.pending:
                        await master.report_progress(task.task_id, report)
            assert list(master.job.training.pending) == [lively.task_id]
            assert master.job.training.requeued[silent.task_id].failures == 1

    run_virtually(main)


def test_a_silent_lane_costs_its_trainer_the_membership_and_spares_the_others() -> None:
    async def main() -> None:
        spec = spec_of(mode=Mode.SYNC, lanes=2, task_timeout_floor_s=5.0, task_timeout_ceiling_s=20.0)
        cluster = MasterCluster(spec)
        async with running(cluster, "t1", "t2") as master:
            await take(cluster, master, "t1", stream=0)
            await asyncio.sleep(1)
            await take(cluster, master, "t2", stream=1)
            await until(lambda: master.job.trainers.names == ("t2",), "t1 to be evicted", 40)
            assert await cluster.etcd.get(KEYS.trainer("t1")) is None
            assert master.job.trainers.lanes_of("t2") == (0, 2)
            assert len(master.job.training.pending) == 1

    run_virtually(main)


# ------------------------------------------------------------------ failing


def test_the_same_error_of_the_model_twice_fails_the_job_with_the_task_it_happened_in() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            for attempt in (1, 2):
                task = await take(cluster, master)
                await master.fail_task(task.task_id, FailTask(trainer="t1", attempt=attempt, failure=NO))
            state = master.job.state
            assert state.phase is Phase.FAILED
            assert state.reason == "ValueError twice before a step was known to be done: no"
            assert state.failure is not None
            assert (state.failure.trainer, state.failure.error_type) == ("t1", "ValueError")
            assert state.failure.task.startswith(f"task {task.task_id} (train.txt records ")
            assert (await master.acquire_task(cluster.ask(master))).answer == "end"

    run_virtually(main)


def test_minibatches_that_an_asynchronous_trainer_has_told_are_steps() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_discarded_fraction=0.5))
        async with running(cluster, "t1") as master:
            for attempt in (1, 2):
                task = await take(cluster, master)
                await master.report_progress(
                    task.task_id, TaskProgress(trainer="t1", attempt=attempt, minibatches=1)
                )
                await master.fail_task(task.task_id, FailTask(trainer="t1", attempt=attempt, failure=NO))
            assert master.job.state.phase is Phase.RUNNING

    run_virtually(main)


def test_a_poisoned_task_is_discarded_and_listed() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_discarded_fraction=0.1))
        async with running(cluster, "t1") as master:
            await master.report_metrics(
                MetricBatch(trainer="t1", steps=(StepMetrics(step=1, epoch=0, loss_sum=1, records=1),))
            )
            poisoned = await take(cluster, master)
            for attempt in (1, 2, 3):
                await master.fail_task(poisoned.task_id, FailTask(trainer="t1", attempt=attempt, failure=NO))
                if attempt < 3:
                    await take(cluster, master)
            assert len(await finish_training(cluster, master)) == 9
            task = await take(cluster, master)
            await master.complete_task(task.task_id, done(task))
            result = master.job.state.result
            assert (result.discarded_tasks, result.discarded_records, result.trained_records) == (1, 10, 90)

    run_virtually(main)


def test_too_much_discarded_fails_the_job() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_discarded_fraction=0.05, max_task_failures=1))
        async with running(cluster, "t1") as master:
            master.job.budget.started = True
            task = await take(cluster, master)
            await master.fail_task(task.task_id, FailTask(trainer="t1", attempt=1, failure=NO))
            state = master.job.state
            assert state.phase is Phase.FAILED
            assert state.reason.startswith(
                "10 of 100 records of epoch 0 are discarded, more than max_discarded_fraction 0.05"
            )
            assert state.failure is not None
            assert state.failure.message == "no"
            result = state.result
            assert (result.discarded_tasks, result.discarded_records, result.trained_records) == (1, 10, 0)

    run_virtually(main)


def test_failures_outside_tasks_use_the_budget_of_the_job() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            await master.report_failure("t1", NO)
            await master.report_failure("t1", NO)
            assert master.job.state.phase is Phase.FAILED
            assert master.job.state.failure == NO.model_copy(update={"trainer": "t1"})

    run_virtually(main)


@pytest.mark.parametrize("in_task", [True, False])
def test_two_failures_across_a_change_of_the_master_count_as_two(in_task: bool) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_user_failures=9))

        async def fail(master: Master) -> None:
            if not in_task:
                await master.report_failure("t1", NO)
                return
            task = await take(cluster, master)
            await master.fail_task(task.task_id, FailTask(trainer="t1", attempt=task.attempt, failure=NO))

        async with running(cluster, "t1") as first:
            await fail(first)
            assert first.job.state.phase is Phase.RUNNING
            counts = first.job.budget.counts
            assert counts.total == 1
        async with leading(cluster.master("m2")) as second:
            assert second.job.budget.counts == counts
            await fail(second)
            state = second.job.state
            assert (state.phase, state.reason) == (
                Phase.FAILED,
                "ValueError twice before a step was known to be done: no",
            )

    run_virtually(main)


def test_a_dead_pserver_without_any_checkpoint_starts_an_asynchronous_job_over() -> None:
    """The other one has to leave: it holds parameters of which half are lost."""

    async def main() -> None:
        cluster = MasterCluster(spec_of(pservers=2))
        async with running(cluster, "t1") as master:
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.timeline > 0, "the job to start over")
            state = master.job.state
            assert (state.phase, 0 in master.job.members.pservers) == (Phase.WAITING, False)
            assert "no checkpoint exists yet: training starts over" in [
                word for event in master.events.after(0, 1000) for word in event.message.split(" and ")
            ]
            await cluster.initialise()
            await until(lambda: master.job.state.phase is Phase.RUNNING, "training")

    run_virtually(main)


@pytest.mark.parametrize("problem", ["unreadable", "empty"])
def test_a_dataset_that_cannot_be_used_makes_a_failed_job(problem: str) -> None:
    async def main() -> None:
        error = DatasetError("train.txt: no such file")
        cluster = MasterCluster(spec_of(), Storage(0) if problem == "empty" else Storage(error=error))
        async with leading(cluster.master()) as master:
            state = master.job.state
            assert state.phase is Phase.FAILED
            expected = "the dataset has no records: train.txt" if problem == "empty" else error.message
            assert state.reason == expected
            assert state.failure is not None
            assert state.failure.error_type == "DatasetError"

    run_virtually(main)


# ------------------------------------------------------------------ suspects


def test_a_suspect_that_refuses_connections_is_dead_at_once_and_a_slow_one_is_not() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1", "t2") as master:
            cluster.dead.add("http://t1")
            assert not await master.report_suspect("t2")
            assert await master.report_suspect("t1")
            await until(lambda: master.job.trainers.names == ("t2",), "t1 to be gone", 1.0)
            with pytest.raises(NotFound, match="no member t9"):
                await master.report_suspect("t9")

    run_virtually(main)
