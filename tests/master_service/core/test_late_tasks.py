"""Late tasks near the end of an epoch are given twice: the first end counts, and the other trainer is
told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from master_service.core.changes import DropPending, NextEpoch, PutPending, PutRequeued
from master_service.core.decisions import tasks
from master_service.core.queue.open_tasks import ENOUGH_DURATIONS
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.job import Job
from tests.equipment.queue_violations import violations
from tests.equipment.replaced import replaced
from tests.master_service.cluster import spec_of, table_of
from trireme_shared.protocol.errors import StaleAttempt
from trireme_shared.protocol.records import (
    AcquireTask,
    Attempt,
    CompleteTask,
    FailTask,
    JobState,
    PendingTask,
    Phase,
    Task,
    TrainerList,
    UserFailure,
)

NAMES = ("slow", "fast", "third")
FAILURE = UserFailure(error_type="ValueError", message="no")


class Scene:
    """A job of two epochs with `count` tasks; the usual task takes one second."""

    def __init__(self, count: int = 2, **fields: object) -> None:
        spec = spec_of(mode="async", epochs=2, max_task_failures=3, shuffle=False, **fields)
        self.job = Job.open(spec, table_of(count), None)
        self.job.state = JobState(phase=Phase.RUNNING, generation=1)
        self.job.trainers = TrainerList(generation=1, names=NAMES)
        self.job.budget.started = True
        self.now, self.requests = 0.0, 0
        for _ in range(ENOUGH_DURATIONS):
            self.job.training.late.observe(1.0)

    def commit(self, decision: object) -> None:
        for change in decision.changes:  # type: ignore[attr-defined]
            self.job.apply(change, self.now)

    def take(self, trainer: str, request: str = "") -> Task | None:
        self.requests += not request
        decision = tasks.acquire(
            self.job, AcquireTask(trainer=trainer, request=request or f"r{self.requests}", generation=1)
        )
        self.commit(decision)
        return decision.answer.task

    def complete(self, trainer: str, task: Task) -> tuple[object, ...]:
        report = CompleteTask(trainer=trainer, attempt=task.attempt, epoch=task.epoch)
        decision = tasks.complete(self.job, task.task_id, report)
        self.commit(decision)
        return decision.changes

    def fail(self, trainer: str, task: Task) -> tuple[object, ...]:
        report = FailTask(trainer=trainer, attempt=task.attempt, failure=FAILURE, epoch=task.epoch)
        decision = tasks.fail_task(self.job, task.task_id, report)
        self.commit(decision)
        return decision.changes

    def later(self, seconds: float) -> int:
        self.now += seconds
        return tasks.find_late(self.job, self.now)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    assert list(violations(scene.job.training)) == []


def both(scene: Scene) -> tuple[Task, Task]:
    """The last task of the epoch, at a slow trainer and at a fast one too."""
    done, late = scene.take("fast"), scene.take("slow")
    assert done is not None
    assert late is not None
    scene.complete("fast", done)
    assert scene.later(2.5) == 1
    again = scene.take("fast")
    assert again is not None
    return late, again


def test_a_late_task_is_given_to_another_trainer_once_nothing_else_is_left(scene: Scene) -> None:
    late, again = both(scene)
    assert (again.task_id, late.attempt, again.attempt) == (late.task_id, 1, 2)
    record = scene.job.training.pending[late.task_id].record
    assert record.attempts == (
        Attempt(attempt=2, trainer="fast", request="r3"),
        Attempt(attempt=1, trainer="slow", request="r2"),
    )
    assert PendingTask.model_validate_json(record.to_bytes()) == record
    assert scene.take("third") is None, "not a third time at once"


def test_nothing_is_given_twice_while_it_is_not_late_or_tasks_are_left() -> None:
    scene = Scene(3)
    scene.take("slow")
    assert scene.later(10.0) == 0, "another task can be given"
    scene.take("fast")
    scene.take("third")
    assert scene.later(1.9) == 1, "the first one is late, the others are not"
    found = scene.take("third")
    assert found is not None
    assert found.task_id == "0"
    assert scene.take("fast") is None


def test_nobody_gets_its_own_task_again(scene: Scene) -> None:
    scene.take("slow")
    scene.take("slow")
    assert scene.later(10.0) == 2
    assert scene.take("slow") is None
    assert scene.take("fast") is not None


def test_no_task_is_late_before_some_were_measured_or_where_that_is_not_wanted() -> None:
    scene = Scene(1)
    scene.job.training.late.durations.clear()
    scene.take("slow")
    assert scene.later(100.0) == 0
    off = Scene(1, stragglers="off")
    off.take("slow")
    assert off.later(100.0) == 0


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_the_first_end_counts_and_the_other_trainer_gets_a_typed_answer(scene: Scene, first: str) -> None:
    late, again = both(scene)
    held = {"slow": late, "fast": again}
    second = "fast" if first == "slow" else "slow"
    changes = scene.complete(first, held[first])
    assert isinstance(changes[0], DropPending)
    assert changes[-1] == NextEpoch(1)
    assert scene.complete(first, held[first]) == (), "its answer got lost"
    with pytest.raises(StaleAttempt):
        scene.complete(second, held[second])


def test_without_the_fence_of_attempts_a_record_would_count_twice() -> None:
    """The late report would end the same task of the next epoch, which nobody has trained."""

    def late_report(scene: Scene) -> tuple[object, ...]:
        late, again = both(scene)
        scene.complete("fast", again)
        while (given := scene.take("fast")) is not None and given.task_id != late.task_id:
            pass
        return scene.complete("slow", late)

    with pytest.raises(StaleAttempt):
        late_report(Scene())
    with replaced(TaskQueue, "check_attempt", lambda *_: None):
        assert isinstance(late_report(Scene())[0], DropPending)


def test_the_same_request_gets_the_same_attempt(scene: Scene) -> None:
    late, again = both(scene)
    assert scene.take("fast", "r3") == again
    assert scene.take("slow", "r2") == late


def test_the_newest_attempt_goes_on_if_the_late_trainer_dies(scene: Scene) -> None:
    late, again = both(scene)
    scene.job.trainers = TrainerList(generation=2, names=("fast", "third"))
    decision = tasks.put_back_lost(scene.job)
    assert [type(change) for change in decision.changes] == [PutPending]
    scene.commit(decision)
    assert not tasks.put_back_lost(scene.job).changes
    with pytest.raises(StaleAttempt):
        scene.complete("slow", late)
    assert scene.complete("fast", again)


def test_the_task_goes_back_if_the_newest_attempt_dies(scene: Scene) -> None:
    """The earlier one may have been told by a parameter server that it was overtaken, and have given up."""
    late, _ = both(scene)
    scene.job.trainers = TrainerList(generation=2, names=("slow", "third"))
    decision = tasks.put_back_lost(scene.job)
    assert [type(change) for change in decision.changes] == [DropPending, PutRequeued]
    scene.commit(decision)
    assert scene.job.training.requeued[late.task_id].failures == 0
    with pytest.raises(StaleAttempt):
        scene.complete("slow", late)


def test_an_error_of_the_earlier_attempt_counts_once_and_the_newest_goes_on(scene: Scene) -> None:
    late, again = both(scene)
    assert [type(change) for change in scene.fail("slow", late)] == [PutPending]
    assert scene.fail("slow", late) == (), "reported twice"
    assert scene.job.training.pending[late.task_id].record.failures == 1
    assert [type(change) for change in scene.fail("fast", again)] == [DropPending, PutRequeued]
    assert scene.job.training.requeued[late.task_id].failures == 2
    third = scene.take("third")
    assert third is not None
    assert third.attempt == 3
    scene.complete("third", third)


def test_a_task_is_given_to_two_at_a_time_and_no_more(scene: Scene) -> None:
    late, again = both(scene)
    assert scene.later(2.5) == 1, "the helper is late too"
    third = scene.take("third")
    assert third is not None
    assert [each.trainer for each in scene.job.training.pending[late.task_id].record.attempts] == [
        "third",
        "fast",
    ]
    with pytest.raises(StaleAttempt):
        scene.complete("slow", late)
    assert scene.complete("fast", again)
