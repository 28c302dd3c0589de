"""Users try a discarded task again, or give one up."""

from __future__ import annotations

from typing import Any

import pytest

from master_service.core.changes import Decision
from master_service.core.decisions import discarded_tasks, tasks
from master_service.core.decisions.queue_at_checkpoint import CutQueue, records_since_cut, restore_to_cut
from master_service.core.state.job import Job
from tests.equipment.queue_violations import violations
from tests.master_service.cluster import spec_of, table_of
from trireme_shared.protocol.errors import Conflict, NotFound, NotReady, StaleAttempt
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    JobState,
    Mode,
    Phase,
    Stage,
    Task,
    TrainerList,
    UserFailure,
)

BY = "asked by 127.0.0.1"


class Asked:
    """A job with one trainer, whose decisions take effect at once."""

    def __init__(self, tasks: int = 3, **values: Any) -> None:
        self.job = Job.open(spec_of(max_task_failures=2, **values), table_of(tasks), None)
        self.job.state = JobState(phase=Phase.RUNNING, generation=1)
        self.job.trainers = TrainerList(generation=1, lanes=values.get("lanes", 0), names=("t",))
        self.job.budget.started = True
        self.requests = 0

    def do(self, decision: Decision[Any]) -> Any:
        for change in decision.changes:
            self.job.apply(change, 0.0)
        assert list(violations(self.job.training)) == []
        return decision.answer

    def take(self, **values: Any) -> Task:
        self.requests += 1
        ask = AcquireTask(trainer="t", request=f"r{self.requests}", generation=1, **values)
        task: Task = self.do(tasks.acquire(self.job, ask)).task
        return task

    def fail(self, task: Task) -> None:
        failure = UserFailure(error_type="ValueError", message="no")
        report = FailTask(trainer="t", attempt=task.attempt, failure=failure, epoch=task.epoch)
        self.do(tasks.fail_task(self.job, task.task_id, report))

    def complete(self, task: Task) -> None:
        report = CompleteTask(trainer="t", attempt=task.attempt, epoch=task.epoch)
        self.do(tasks.complete(self.job, task.task_id, report))

    def retry(self, task_id: str) -> Any:
        return self.do(discarded_tasks.retry(self.job, task_id, BY))

    def skip(self, task_id: str) -> Any:
        return self.do(discarded_tasks.skip(self.job, task_id, BY))


def test_a_discarded_task_is_given_out_again_with_the_attempts_before_it() -> None:
    asked = Asked()
    for _ in range(2):
        task = asked.take()
        asked.fail(task)
    assert asked.job.training.state_of(task.task_id) == "DISCARDED"
    again = asked.retry(task.task_id)
    assert (again.state, again.record.attempts, again.record.failures) == ("REQUEUED", 2, 0)
    assert BY in again.record.cause
    assert asked.retry(task.task_id).state == "REQUEUED", "nothing changes"
    given = asked.take()
    assert (given.task_id, given.attempt) == (task.task_id, 3), "the ledgers go on from the attempts before"
    asked.complete(given)
    with pytest.raises(Conflict, match="DONE"):
        asked.retry(task.task_id)
    assert asked.job.training.counts == (2, 0, 1, 0)


def test_a_skipped_task_is_discarded_and_its_trainer_is_told_so() -> None:
    asked = Asked(epochs=2)
    pending, requeued = asked.take(), asked.take()
    asked.fail(requeued)
    for task in (pending, requeued):
        gone = asked.skip(task.task_id)
        assert (gone.state, gone.record.attempts) == ("DISCARDED", 1)
        assert BY in gone.record.cause
        assert asked.skip(task.task_id).state == "DISCARDED"
    with pytest.raises(StaleAttempt):
        asked.complete(pending)
    last = asked.take()
    with pytest.raises(NotFound):
        asked.skip("17")
    asked.complete(last)
    assert asked.job.training.epoch == 1
    with pytest.raises(Conflict, match="discarded in epoch 0, which is over"):
        asked.retry(pending.task_id)


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED"])
def test_the_last_task_of_an_epoch_ends_it_when_it_is_skipped(state: str) -> None:
    asked = Asked(tasks=1, epochs=1)
    task = asked.take()
    if state == "REQUEUED":
        asked.fail(task)
    asked.skip(task.task_id)
    assert asked.job.state.stage is not Stage.TRAIN
    with pytest.raises(Conflict, match="is not what the job does now"):
        asked.retry(task.task_id)


def test_a_lane_gives_a_task_up_once_its_attempt_has_failed_and_tries_none_again() -> None:
    asked = Asked(tasks=4, mode=Mode.SYNC, lanes=2, checkpoint_kind="coordinated")
    task = asked.take(stream=0, epoch=0, index=0)
    told = asked.skip(task.task_id)
    assert (told.state, told.failures) == ("PENDING", 1)
    asked.fail(task)
    assert asked.job.training.state_of(task.task_id) == "DISCARDED"
    with pytest.raises(Conflict, match="its lane has gone on"):
        asked.retry(task.task_id)


def test_nobody_skips_more_than_the_job_may_lose() -> None:
    asked = Asked(max_discarded_fraction=0.4)
    first, second = asked.take(), asked.take()
    asked.skip(first.task_id)
    with pytest.raises(Conflict, match="20 of 30 records of epoch 0 would be discarded"):
        asked.skip(second.task_id)
    assert asked.job.training.state_of(second.task_id) == "PENDING"


def test_a_job_that_stands_still_changes_no_task() -> None:
    asked = Asked()
    task = asked.take()
    asked.job.state = JobState(phase=Phase.CHECKPOINTING, generation=1)
    for request in (asked.skip, asked.retry):
        with pytest.raises(NotReady, match="CHECKPOINTING"):
            request(task.task_id)


def test_a_task_that_is_done_since_a_checkpoint_in_which_it_was_discarded_is_lost_with_it() -> None:
    asked = Asked()
    first = asked.take()
    asked.skip(first.task_id)
    put = asked.job.training.discarded[0, first.task_id]
    cut = CutQueue(0, 1, {}, {(0, first.task_id): put.task}, asked.job.losses)
    assert records_since_cut(asked.job, cut) == 0
    asked.retry(first.task_id)
    assert records_since_cut(asked.job, cut) == 0
    asked.complete(asked.take())
    assert records_since_cut(asked.job, cut) == 10
    for change in restore_to_cut(asked.job, cut):
        asked.job.apply(change, 0.0)
    assert asked.job.training.state_of(first.task_id) == "DISCARDED"
