"""A helper asks which task a late lane has: it is told just that, and nothing changes."""

from __future__ import annotations

import pytest

from master_service.core.decisions import tasks
from master_service.core.state.job import Job
from tests.master_service.cluster import spec_of, table_of
from trireme_shared.protocol.errors import InvalidArgument, StaleGeneration
from trireme_shared.protocol.records import AcquireTask, JobState, Phase, TrainerList


@pytest.fixture
def job() -> Job:
    job = Job.open(spec_of(mode="sync", lanes=2, global_batch_size=2, epochs=2), table_of(6), None)
    job.state = JobState(phase=Phase.RUNNING, generation=1, timeline=0)
    job.trainers = TrainerList(generation=1, lanes=2, names=("helper", "late"))
    return job


def ask(
    trainer: str = "helper",
    index: int = 0,
    epoch: int = 0,
    *,
    look: bool = True,
    generation: int = 1,
    lane: int = 1,
):
    return AcquireTask(
        trainer=trainer,
        request=f"{trainer}-{index}",
        generation=generation,
        stream=lane,
        epoch=epoch,
        index=index,
        look=look,
    )


def give(job: Job, index: int):
    decision = tasks.acquire(job, ask("late", index, look=False))
    for change in decision.changes:
        job.apply(change, 0.0)
    return decision.answer.task


def test_it_is_the_task_that_the_owner_has(job: Job) -> None:
    given = give(job, 0)
    decision = tasks.acquire(job, ask())
    assert decision.answer.task == given
    assert (decision.changes, decision.events) == ((), ())


def test_there_is_none_before_the_owner_has_it(job: Job) -> None:
    assert tasks.acquire(job, ask()).answer.answer == "wait"
    give(job, 0)
    assert tasks.acquire(job, ask(index=1)).answer.answer == "wait"
    assert tasks.acquire(job, ask(epoch=1)).answer.answer == "wait", "and the epoch is not closed by it"
    assert job.training.epoch == 0


def test_a_task_that_is_put_back_is_its_next_owners_to_take(job: Job) -> None:
    given = give(job, 0)
    assert given is not None
    for change in job.training.put_back(given.task_id, "late is gone"):
        job.apply(change, 0.0)
    assert tasks.acquire(job, ask()).answer.answer == "wait"


def test_a_task_that_is_behind_the_lane_is_still_known(job: Job) -> None:
    first = give(job, 0)
    give(job, 1)
    assert tasks.acquire(job, ask()).answer.task == first


def test_only_members_of_this_generation_may_look_and_only_at_lanes(job: Job) -> None:
    with pytest.raises(StaleGeneration):
        tasks.acquire(job, ask("stranger"))
    with pytest.raises(StaleGeneration):
        tasks.acquire(job, ask(generation=2))
    with pytest.raises(InvalidArgument):
        tasks.acquire(job, ask(lane=2))
    with pytest.raises(StaleGeneration):
        tasks.acquire(job, ask(look=False))
