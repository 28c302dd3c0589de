"""Deaths of processes count against the place at which they died; a deadly record is discarded, and chance
discards nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from master_service.core.changes import Decision
from master_service.core.decisions import discarded_tasks, tasks
from master_service.core.state.job import Job
from tests.equipment.queue_violations import violations
from tests.master_service.cluster import spec_of, table_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    FailureCause,
    JobState,
    Mode,
    Phase,
    Task,
    TaskAnswer,
    TrainerList,
    UserFailure,
)

CAUSE = "trainer-0 crashed with SIGSEGV while it computed records 3-4 of x.npy"


class Dying:
    """A job whose only trainer dies and comes back under other names; decisions take effect at once, as
    TaskService takes them."""

    def __init__(self, count: int = 3, **values: Any) -> None:
        values = {"max_discarded_fraction": 1.0, **values}
        self.job = Job.open(spec_of(**values), table_of(count), None)
        self.job.state = JobState(phase=Phase.RUNNING, generation=1)
        self.lanes = values.get("lanes", 0) if values.get("mode") is Mode.SYNC else 0
        self.names = self.requests = 0
        self.reborn()

    @property
    def trainer(self) -> str:
        return f"trainer-0-{self.names}"

    def reborn(self) -> None:
        """Under another name; the tasks of the dead one are put back."""
        self.names += 1
        self.job.trainers = TrainerList(generation=1, lanes=self.lanes, names=(self.trainer,))
        self.do(tasks.put_back_lost(self.job))

    def do(self, decision: Decision[Any]) -> Any:
        for change in decision.changes:
            self.job.apply(change, 0.0)
        assert list(violations(self.job.training)) == []
        return decision.answer

    def ask(self, **values: Any) -> TaskAnswer:
        self.requests += 1
        ask = AcquireTask(trainer=self.trainer, request=f"r{self.requests}", generation=1, **values)
        self.do(discarded_tasks.discard_deadly(self.job, ask))
        answer: TaskAnswer = self.do(tasks.acquire(self.job, ask))
        return answer

    def take(self, **values: Any) -> Task:
        task = self.ask(**values).task
        assert task is not None
        return task

    def dies_at(self, task: Task, minibatch: int, trainer: str = "") -> None:
        """Its successor says so."""
        name = trainer or self.trainer
        failure = UserFailure(error_type=discarded_tasks.DIED, message=CAUSE, trainer=name)
        report = FailTask(trainer=name, attempt=0, failure=failure, epoch=task.epoch, died_at=minibatch)
        self.do(discarded_tasks.count(self.job, task.task_id, report))
        if not trainer:
            self.reborn()

    def complete(self, task: Task) -> None:
        report = CompleteTask(trainer=self.trainer, attempt=task.attempt, epoch=task.epoch)
        self.do(tasks.complete(self.job, task.task_id, report))

    @property
    def discarded(self) -> dict[tuple[int, str], str]:
        return {place: put.task.cause for place, put in self.job.training.discarded.items()}


def test_three_deaths_at_one_minibatch_discard_its_task_with_their_cause() -> None:
    job = Dying()
    given = []
    for _ in range(3):
        given.append(job.take())
        job.dies_at(given[-1], 1)
    assert {task.task_id for task in given} == {given[0].task_id}
    assert [task.alone for task in given] == [False, True, True]
    assert job.discarded == {}, "nobody asks yet"
    assert job.take().task_id != given[0].task_id
    assert job.discarded == {(0, given[0].task_id): f"3 processes died at it, the last: {CAUSE}"}


def test_deaths_at_other_minibatches_or_before_somebody_completed_the_task_are_chance() -> None:
    job = Dying(count=1)
    for minibatch in (0, 0, 1, 0, 0, -1, -1, 0):
        job.dies_at(job.take(), minibatch)
    job.complete(job.take())
    assert job.job.budget.counts.deaths == ()
    assert job.discarded == {}


def test_the_death_of_one_process_counts_once_however_often_it_is_reported() -> None:
    job = Dying()
    task = job.take()
    for _ in range(5):
        job.dies_at(task, 0, trainer="trainer-7-1")
    job.reborn()
    assert job.take().task_id == task.task_id
    assert len(job.job.budget.counts.deaths[0].trainers) == 1


@pytest.mark.parametrize("allowed", [1, 5])
def test_more_failures_may_be_allowed_and_never_fewer_deaths_than_three(allowed: int) -> None:
    job = Dying(max_task_failures=allowed)
    task, count = job.take(), 0
    while not job.discarded:
        job.dies_at(task, 0)
        count += 1
        job.ask()
    assert count == max(3, allowed)


def test_a_lane_skips_the_task_whether_its_dead_trainers_attempt_was_put_back_or_not() -> None:
    for put_back in (True, False):
        job = Dying(count=4, mode=Mode.SYNC, lanes=2)
        task = job.take(stream=1)
        for number in range(3):
            job.dies_at(task, 0, trainer=f"trainer-0-dead-{number}")
        if put_back:
            job.reborn()
        assert job.ask(stream=1).answer == "skip"
        assert list(job.discarded) == [(0, task.task_id)]
        assert job.ask(stream=1, index=1).answer == "task"
        assert job.ask(stream=0).answer == "task", "the other lane goes on"


def test_a_lanes_task_that_is_to_come_again_after_a_rollback_is_skipped_too() -> None:
    job = Dying(count=2, mode=Mode.SYNC, lanes=1)
    first = job.job.training.streams.at(0, 0, 0)
    at = job.job.training.streams.task(first, 1, 0, 0, 0)
    for number in range(3):
        job.dies_at(at, 0, trainer=f"t-{number}")
    assert job.ask(stream=0).answer == "skip"
    assert job.ask(stream=0, index=1).answer == "task"


def test_in_a_later_epoch_one_more_death_is_enough() -> None:
    job = Dying(count=1, epochs=3)
    for _ in range(3):
        job.dies_at(job.take(), 1)
    task = job.take()
    assert (job.job.training.epoch, task.alone) == (1, False)
    job.dies_at(task, 2)
    assert job.take().epoch == 2
    assert list(job.discarded) == [(0, "0"), (1, "0")]


def test_too_many_of_them_fail_the_job_and_the_reason_names_the_records() -> None:
    job = Dying(max_discarded_fraction=0.1)
    task = job.take()
    for _ in range(3):
        job.dies_at(task, 0)
    job.ask()
    assert (job.job.state.phase, job.job.state.cause) == (Phase.FAILED, FailureCause.SCRIPT)
    assert CAUSE in job.job.state.reason


@pytest.mark.parametrize(("epoch", "minibatch"), [(0, -2), (-1, 0), (2, 0)])
def test_a_place_that_the_job_cannot_have_is_refused(epoch: int, minibatch: int) -> None:
    job = Dying(epochs=2)
    task = job.take().model_copy(update={"epoch": epoch})
    with pytest.raises(InvalidArgument, match="the queue has 2 epochs"):
        job.dies_at(task, minibatch)


def test_places_are_bounded_however_many_processes_die() -> None:
    job = Dying(count=400)
    task = job.take()
    for number in range(400):
        other = task.model_copy(update={"task_id": str(number)})
        job.dies_at(other, 0, trainer=f"t-{number}")
    assert len(job.job.budget.counts.deaths) == discarded_tasks.MOST_PLACES


@pytest.mark.parametrize("seed", range(20))
def test_processes_killed_at_random_discard_nothing(seed: int) -> None:
    """Kills that hit each minibatch with a probability of 3 %, so two in a row at one place are common; every
    task is trained."""
    chance, job = random.Random(seed), Dying(count=40)
    kills = done = 0
    while job.job.training.epoch == 0:
        task = job.take()
        for minibatch in range(8):
            if chance.random() < 0.03:
                kills += 1
                job.dies_at(task, minibatch)
                break
        else:
            done += 1
            job.complete(task)
    assert (done, job.discarded) == (40, {})
    assert kills > 3


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_a_silent_lane_loses_its_trainer_and_never_its_task_since_another_lane_may_be_what_hangs(
    mode: Mode,
) -> None:
    lanes = {"lanes": 2} if mode is Mode.SYNC else {}
    job = Dying(count=2, mode=mode, **lanes)
    stream = {"stream": 0} if mode is Mode.SYNC else {}
    task = job.take(**stream)
    for _ in range(5):
        evicted = job.do(tasks.expire(job.job, 1e9))
        assert evicted == ([job.trainer] if mode is Mode.SYNC else [])
        job.reborn()
        if job.discarded:
            break
        assert job.take(**stream).task_id == task.task_id
    assert bool(job.discarded) is (mode is Mode.ASYNC)
