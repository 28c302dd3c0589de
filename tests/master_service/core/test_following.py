"""With a lane's task the master names the one behind it, whose records may be read ahead. Nobody gets that
task by it."""

from __future__ import annotations

import pytest

from master_service.core.decisions import tasks
from master_service.core.state.job import Job
from tests.master_service.cluster import spec_of, table_of
from trireme_shared.protocol.records import AcquireTask, JobState, Mode, Phase, Task, TrainerList
from trireme_shared.protocol.records.queue import Deaths
from trireme_shared.protocol.records.tasks import READING

LANES, TASKS, EPOCHS = 2, 6, 2


def job_of(**values: object) -> Job:
    job = Job.open(spec_of(**{"epochs": EPOCHS, **values}), table_of(TASKS), None)
    job.state = JobState(phase=Phase.RUNNING, generation=1, timeline=1)
    job.trainers = TrainerList(generation=1, lanes=LANES, names=("owner",))
    return job


@pytest.fixture
def job() -> Job:
    return job_of(mode="sync", lanes=LANES, global_batch_size=LANES)


def give(job: Job, index: int = 0, epoch: int = 0, lane: int | None = 0):
    """The answer to a trainer that asks for it."""
    request = f"{epoch}-{index}-{lane}-{len(job.training.repeats.requests)}"
    ask = AcquireTask(trainer="owner", request=request, generation=1, stream=lane, epoch=epoch, index=index)
    decision = tasks.acquire(job, ask)
    for change in decision.changes:
        job.apply(change, 0.0)
    return decision.answer


def died_at(job: Job, task: Task) -> None:
    """A process has died while it read the task's records."""
    counts = job.budget.counts
    deaths = Deaths(epoch=task.epoch, task_id=task.task_id, minibatch=READING, trainers=("x",), cause="died")
    job.budget.counts = counts.with_fields(deaths=(*counts.deaths, deaths))


def test_the_task_that_is_named_is_the_one_that_is_given_next(job: Job) -> None:
    named: list[Task | None] = []
    given = []
    for epoch in range(EPOCHS):
        for index in range(TASKS // LANES):
            for lane in range(LANES):
                answer = give(job, index, epoch, lane)
                if lane == 0:
                    given.append(answer.task)
                    named.append(answer.following)
    expected = [task.with_fields(attempt=0) for task in given]
    assert named == [*expected[1:], None], "in the next epoch too; none behind the last task"


def test_nobody_is_given_the_task_that_is_named(job: Job) -> None:
    answer = give(job)
    assert answer.following is not None
    assert job.training.state_of(answer.following.task_id) == "TODO"
    assert list(job.training.pending) == [answer.task.task_id]
    assert job.training.epoch == 0


def test_the_first_task_of_the_next_epoch_closes_no_epoch(job: Job) -> None:
    for index in range(TASKS // LANES):
        answer = give(job, index)
    assert answer.following is not None
    assert (answer.following.epoch, answer.following.index) == (1, 0)
    assert job.training.epoch == 0


def test_a_discarded_task_is_not_named(job: Job) -> None:
    lost = give(job).following
    assert lost is not None
    give(job, 1)
    closing = job.training.give_up(lost.task_id, "no", spent=True)
    for change in closing.changes:
        job.apply(change, 0.0)
    assert give(job, 0).following is None


def test_records_at_which_a_process_has_died_are_not_read_ahead(job: Job) -> None:
    answer = give(job)
    assert answer.following is not None
    died_at(job, answer.following)
    assert give(job).following is None
    died_at(job, answer.task)
    again = give(job)
    assert again.task.alone
    assert again.following is None


def test_tasks_of_the_shared_stream_name_none() -> None:
    job = job_of(mode=Mode.ASYNC, checkpoint_kind="independent")
    assert give(job, lane=None).task is not None
    assert give(job, 1, lane=None).following is None
