"""The task queue: what each transition does, on whole values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from master_service.core.changes import (
    DropPending,
    DropRequeued,
    NextEpoch,
    PutCursor,
    PutDiscarded,
    PutPending,
    PutRequeued,
)
from master_service.core.queue.open_tasks import Deadlines
from master_service.core.queue.streams import Streams
from master_service.core.queue.task_queue import Closing, TaskQueue
from tests.equipment.queue_violations import violations
from tests.master_service.cluster import table_of
from trireme_shared.protocol.errors import Conflict, NotFound, StaleAttempt
from trireme_shared.protocol.records import (
    AcquireTask,
    PendingTask,
    RequeuedTask,
    TaskAnswer,
    TaskKind,
    TrainerList,
)


class Clock:
    now = 0.0


@pytest.fixture
def queue() -> Iterator[TaskQueue]:
    queue = TaskQueue(Streams(TaskKind.TRAIN, table_of(3)), Deadlines(10.0, 100.0), epochs=2)
    yield queue
    assert list(violations(queue)) == []


@pytest.fixture
def lanes() -> Iterator[TaskQueue]:
    """Lane 0: tasks 0 2 4, lane 1: tasks 1 3."""
    queue = TaskQueue(Streams(TaskKind.TRAIN, table_of(5), 2), Deadlines(10.0, 100.0), by_lane=True, epochs=2)
    yield queue
    assert list(violations(queue)) == []


def ask(
    request: str = "r", trainer: str = "t1", epoch: int = 0, index: int = 0, stream: int | None = None
) -> AcquireTask:
    return AcquireTask(
        trainer=trainer, request=request, generation=1, stream=stream, epoch=epoch, index=index
    )


def take(queue: TaskQueue, request: str, trainer: str = "t1", now: float = 0.0) -> TaskAnswer:
    answer, changes = queue.dispatch(ask(request, trainer))
    for change in changes:
        queue.apply(change, now)
    return answer


def take_lane(
    queue: TaskQueue, request: str, lane: int, index: int, epoch: int = 0, trainer: str = "t1"
) -> TaskAnswer:
    wanted = ask(request, trainer, epoch, index, lane)
    for change in queue.close_before(wanted):
        queue.apply(change, 0.0)
    answer, changes = queue.dispatch_lane(wanted, lane)
    for change in changes:
        queue.apply(change, 0.0)
    return answer


def close(queue: TaskQueue, closing: Closing, now: float = 0.0) -> Closing:
    for change in closing.changes:
        queue.apply(change, now)
    return closing


def test_dispatch_moves_the_cursor_and_puts_the_first_attempt(queue: TaskQueue) -> None:
    answer, changes = queue.dispatch(ask("r1"))
    record = PendingTask(
        attempt=1, trainer="t1", stream="0", epoch=0, index=0, remaining_s=100.0, failures=0, request="r1"
    )
    assert changes == (PutCursor("0", 1), PutPending("0", record))
    assert answer.task is not None
    assert (answer.task.task_id, answer.task.attempt, answer.task.file) == ("0", 1, "train.txt")
    assert (answer.task.first, answer.task.count, answer.stream_length) == (0, 10, 3)


def test_deciding_changes_nothing(queue: TaskQueue) -> None:
    before = repr(queue)
    queue.dispatch(ask("r1"))
    assert repr(queue) == before == "<TaskQueue TRAIN epoch 0: 3 todo, 0 pending, 0 done, 0 discarded>"


def test_the_same_request_gets_the_same_task_again(queue: TaskQueue) -> None:
    first = take(queue, "r1")
    assert queue.dispatch(ask("r1")) == (first, ())
    assert queue.counts == (2, 1, 0, 0)


def test_a_request_whose_task_was_reported_is_refused(queue: TaskQueue) -> None:
    take(queue, "r1")
    close(queue, queue.finish("0", 1, "t1"))
    with pytest.raises(Conflict, match="use a new request id"):
        queue.dispatch(ask("r1"))


def test_finish_drops_the_pending_key_and_nothing_else(queue: TaskQueue) -> None:
    take(queue, "r1")
    assert queue.finish("0", 1, "t1") == Closing((DropPending("0", reported=True),))


def test_the_last_finish_advances_the_epoch(queue: TaskQueue) -> None:
    for n in range(3):
        take(queue, f"r{n}")
    close(queue, queue.finish("1", 1, "t1"))
    close(queue, queue.finish("0", 1, "t1"))
    assert close(queue, queue.finish("2", 1, "t1")).changes == (DropPending("2", reported=True), NextEpoch(1))
    assert queue.counts == (3, 0, 0, 0)


def test_a_discard_that_closes_the_epoch_advances_it(queue: TaskQueue) -> None:
    queue.max_failures = 1
    for n in range(3):
        take(queue, f"r{n}")
    close(queue, queue.finish("0", 1, "t1"))
    close(queue, queue.finish("1", 1, "t1"))
    closing = close(queue, queue.fail("2", 1, "t1", "boom"))
    assert closing.last
    assert [type(change) for change in closing.changes] == [DropPending, PutDiscarded, NextEpoch]
    assert queue.epoch == 1


def test_failing_requeues_with_one_failure_and_the_next_attempt_is_higher(queue: TaskQueue) -> None:
    take(queue, "r1")
    closing = close(queue, queue.fail("0", 1, "t1", "ValueError: no"))
    back = RequeuedTask(attempts=1, failures=1, cause="ValueError: no", stream="0", epoch=0, index=0)
    assert closing.changes == (DropPending("0", reported=True), PutRequeued("0", back))
    answer, changes = queue.dispatch(ask("r2", "t2"))
    assert answer.task is not None
    assert (answer.task.task_id, answer.task.attempt) == ("0", 2)
    assert changes[0] == DropRequeued("0")
    put = changes[1]
    assert isinstance(put, PutPending)
    assert put.task.failures == 1


def test_failures_at_the_limit_discard_the_task_for_this_epoch_only(queue: TaskQueue) -> None:
    for attempt in (1, 2, 3):
        take(queue, f"r{attempt}")
        close(queue, queue.fail("0", attempt, "t1", "boom"))
    lost = queue.discarded[0, "0"]
    assert (lost.task.failures, lost.task.attempts, lost.records) == (3, 3, 10)
    assert queue.counts == (2, 0, 0, 1)
    for n in range(2):
        task = take(queue, f"s{n}").task
        assert task is not None
        close(queue, queue.finish(task.task_id, 1, "t1"))
    assert queue.epoch == 1
    assert queue.counts == (3, 0, 0, 0)
    assert list(queue.discarded) == [(0, "0")]


def test_a_lost_trainer_costs_an_attempt_but_no_failure(queue: TaskQueue) -> None:
    for attempt in range(1, 8):
        take(queue, f"r{attempt}")
        for change in queue.put_back("0", "t1 is gone"):
            queue.apply(change, 0.0)
    assert queue.requeued["0"].failures == 0
    assert queue.requeued["0"].attempts == 7


@pytest.mark.parametrize(("attempt", "trainer"), [(1, "t1"), (2, "t1"), (3, "t2")])
def test_only_the_pending_attempt_of_its_trainer_may_report(
    queue: TaskQueue, attempt: int, trainer: str
) -> None:
    take(queue, "r1", "t1")
    for change in queue.put_back("0", "t1 is gone"):
        queue.apply(change, 0.0)
    take(queue, "r2", "t2")
    before = repr(queue)
    message = (
        f"task 0 attempt {attempt} of {trainer} is stale: attempt 2 of epoch 0 is pending at t2; fetch "
        "a new task"
    )
    for report in (
        lambda: queue.finish("0", attempt, trainer),
        lambda: queue.fail("0", attempt, trainer, "late"),
        lambda: queue.check_attempt("0", attempt, trainer),
    ):
        with pytest.raises(StaleAttempt) as caught:
            report()
        assert str(caught.value) == message
    assert repr(queue) == before


def test_a_report_delayed_into_the_next_epoch_is_stale(queue: TaskQueue) -> None:
    for n in range(3):
        take(queue, f"r{n}")
    for task_id in ("0", "1", "2"):
        close(queue, queue.finish(task_id, 1, "t1"))
    take(queue, "s0")
    with pytest.raises(StaleAttempt):
        queue.finish("0", 1, "t1", epoch=7)
    assert queue.finish("0", 1, "t1", epoch=1).changes == (DropPending("0", reported=True),)


def test_a_doubled_report_changes_nothing(queue: TaskQueue) -> None:
    take(queue, "r1")
    close(queue, queue.finish("0", 1, "t1"))
    assert queue.finish("0", 1, "t1") == Closing(())
    take(queue, "r2")
    close(queue, queue.fail("1", 1, "t1", "boom"))
    assert queue.fail("1", 1, "t1", "boom") == Closing(())


def test_wait_while_the_last_tasks_are_under_way_and_end_after_the_last_epoch(queue: TaskQueue) -> None:
    for epoch in range(2):
        for n in range(3):
            take(queue, f"{epoch}-{n}")
        waiting = take(queue, "x")
        assert waiting == TaskAnswer(
            answer="wait", reason=f"the last 3 tasks of epoch {epoch} are under way", retry_after_s=0.2
        )
        for task_id in ("0", "1", "2"):
            close(queue, queue.finish(task_id, 1, "t1"))
    assert take(queue, "y").answer == "end"
    assert repr(queue) == "<TaskQueue TRAIN epoch 2: 0 todo, 0 pending, 3 done, 0 discarded>"


def test_progress_keeps_a_task_alive_and_silence_makes_it_overdue(queue: TaskQueue) -> None:
    take(queue, "r1", now=0.0)
    queue.sign_of_life("0", 1, 90.0)
    assert queue.overdue(150.0) == []
    assert queue.overdue(191.0) == ["0"]


def test_other_work_keeps_a_task_alive_and_says_nothing_about_minibatches(queue: TaskQueue) -> None:
    take(queue, "r1", now=0.0)
    for n in range(1, 21):
        assert queue.sign_of_life("0", 0, 5.0 * n, work=n)
    assert not queue.sign_of_life("0", 0, 101.0, work=20)
    assert queue.deadlines.allowed_s() == 100.0
    assert queue.overdue(199.0) == []
    assert queue.overdue(201.0) == ["0"]


def test_who_waits_between_steps_is_not_late(queue: TaskQueue, lanes: TaskQueue) -> None:
    """Of a lane. Who waits because of max_staleness has a limit of its own."""
    take_lane(lanes, "r1", 0, 0)
    take(queue, "r1", now=0.0)
    for each in (queue, lanes):
        assert not each.sign_of_life("0", 0, 90.0, waits_for="evaluation 1 is not over")
        assert each.overdue(189.0) == ([] if each.by_lane else ["0"])
    lanes.sign_of_life("0", 0, 100.0)
    assert lanes.overdue(191.0) == ["0"]


def test_deadlines_follow_the_silences_between_floor_and_ceiling() -> None:
    deadlines = Deadlines(10.0, 100.0)
    assert deadlines.allowed_s() == 100.0
    for _ in range(20):
        deadlines.observe(0.1)
    assert deadlines.allowed_s() == 10.0
    deadlines.observe(8.0)
    assert deadlines.allowed_s() == 32.0
    deadlines.observe(1000.0)
    assert deadlines.allowed_s() == 100.0


def test_that_the_first_step_of_tasks_of_lanes_begins_says_nothing_about_how_long_steps_take() -> None:
    """All tasks of a job are given out at once, and their first minibatches are handed out soon after: that
    are enough silences, and all are short."""
    tasks, longest_s = 16, 1200.0
    queue = TaskQueue(
        Streams(TaskKind.TRAIN, table_of(tasks), tasks), Deadlines(10.0, longest_s), by_lane=True
    )
    for lane in range(tasks):
        take_lane(queue, f"r{lane}", lane, 0)
    for task_id in list(queue.pending):
        queue.sign_of_life(task_id, 1, 5.0)
    assert queue.overdue(5.0 + longest_s) == []
    for task_id in list(queue.pending):
        queue.sign_of_life(task_id, 2, 105.0)  # that step took as long as a step takes
    assert queue.overdue(105.0 + 399.0) == []
    assert queue.overdue(105.0 + 401.0)


def test_who_gets_the_lanes_of_others_may_be_silent_for_longer(lanes: TaskQueue) -> None:
    lanes.deadlines.trainers = TrainerList(generation=1, lanes=2, names=("t1", "t2"))
    take_lane(lanes, "r1", 0, 0, trainer="t1")
    for _ in range(20):
        lanes.deadlines.observe(5.0)
    lanes.sign_of_life("0", 1, 1.0)
    assert lanes.overdue(1.0 + 21.0) == ["0"]
    lanes.deadlines.trainers = TrainerList(generation=2, lanes=2, names=("t1",))
    assert lanes.overdue(1.0 + 39.0) == []
    assert lanes.overdue(1.0 + 41.0) == ["0"]


@pytest.mark.parametrize(
    ("names", "shares"), [(("t2",), ()), (("t1", "t2"), ()), (("t1", "t2"), ((2, 1), (1, 1)))]
)
def test_the_ceiling_counts_for_each_lane_of_the_trainer_with_the_most(
    lanes: TaskQueue, names, shares
) -> None:
    """No minibatch hangs, though a step of the trainer that has the lanes of others takes longer than the
    ceiling. Who waits for it is silent, too."""
    lanes.deadlines.trainers = TrainerList(generation=1, lanes=1 + len(names), names=names, shares=shares)
    take_lane(lanes, "r1", 1, 0, trainer="t2")
    taken = next(iter(lanes.pending))
    assert lanes.overdue(199.0) == []
    assert lanes.overdue(201.0) == [taken]
    for _ in range(20):
        lanes.deadlines.observe(180.0, "t2")
    lanes.sign_of_life(taken, 1, 150.0)
    assert lanes.overdue(150.0 + 199.0) == []
    assert lanes.overdue(150.0 + 201.0) == [taken]


def test_ids_of_other_kinds_and_beyond_the_end_do_not_exist(queue: TaskQueue) -> None:
    for task_id in ("3", "-1", "evaluate-0", "01", "", "x", "٣", "9" * 100):
        with pytest.raises(NotFound):
            queue.streams.number(task_id)


# ------------------------------------------------------------------ lanes


def test_a_lane_is_given_its_own_slice_in_order(lanes: TaskQueue) -> None:
    given = [take_lane(lanes, f"r{i}", 0, i).task for i in range(3)]
    assert [task.task_id for task in given if task] == ["0", "2", "4"]
    assert given[0] is not None
    assert (given[0].stream, given[0].stream_length) == (0, 3)
    assert take_lane(lanes, "r", 0, 3) == TaskAnswer(answer="exhausted", stream_length=3)


def test_asking_for_an_index_proves_the_ones_before_it_committed(lanes: TaskQueue) -> None:
    take_lane(lanes, "r0", 0, 0)
    take_lane(lanes, "r1", 0, 1)
    assert list(lanes.pending) == ["2"]
    assert lanes.state_of("0") == "DONE"
    assert lanes.finish("0", 1, "t1") == Closing(())


def test_a_failure_of_a_lanes_task_that_is_done_is_not_mistaken_for_a_repeat(lanes: TaskQueue) -> None:
    """Its trainer computes it again, under a new generation: unless it is told that this is no task's failure
    it never ends."""
    take_lane(lanes, "r0", 0, 0)
    take_lane(lanes, "r1", 0, 1)
    assert take_lane(lanes, "r2", 0, 0).answer == "task"
    for epoch in (None, 0):
        with pytest.raises(StaleAttempt, match="the task is DONE"):
            lanes.fail("0", 1, "t1", "out of memory", epoch)


def test_a_lanes_requeued_task_is_done_when_the_next_one_is_asked_for(lanes: TaskQueue) -> None:
    take_lane(lanes, "r0", 0, 0)
    for change in lanes.put_back("0", "t1 is gone"):
        lanes.apply(change, 0.0)
    take_lane(lanes, "r1", 0, 1, trainer="t2")
    assert lanes.state_of("0") == "DONE"
    assert not lanes.requeued


def test_a_new_owner_takes_the_task_over_with_a_higher_attempt(lanes: TaskQueue) -> None:
    take_lane(lanes, "r0", 0, 0, trainer="t1")
    answer = take_lane(lanes, "r1", 0, 0, trainer="t2")
    assert answer.task is not None
    assert answer.task.attempt == 2
    with pytest.raises(StaleAttempt):
        lanes.finish("0", 1, "t1")


def test_a_done_task_is_given_once_more_without_a_change(lanes: TaskQueue) -> None:
    """A trainer that joined one version behind computes it again; its pushes are duplicates."""
    take_lane(lanes, "r0", 0, 0)
    take_lane(lanes, "r1", 0, 1)
    before = repr(lanes)
    answer, changes = lanes.dispatch_lane(ask("r2", "t2", 0, 0, 0), 0)
    assert (answer.task and answer.task.task_id, changes) == ("0", ())
    assert repr(lanes) == before


def test_asking_for_the_next_epoch_closes_this_one_for_all_lanes(lanes: TaskQueue) -> None:
    for lane, length in ((0, 3), (1, 2)):
        for index in range(length):
            take_lane(lanes, f"r{lane}{index}", lane, index)
    for change in lanes.put_back("3", "t1 is gone"):
        lanes.apply(change, 0.0)
    assert repr(lanes) == "<TaskQueue TRAIN epoch 0: 1 todo, 1 pending, 3 done, 0 discarded>"
    assert lanes.close_before(ask("s", epoch=1, stream=0)) == (NextEpoch(1),)
    take_lane(lanes, "s", 0, 0, epoch=1)
    assert repr(lanes) == "<TaskQueue TRAIN epoch 1: 4 todo, 1 pending, 0 done, 0 discarded>"
    behind = take_lane(lanes, "t", 1, 1, epoch=0, trainer="t2")
    assert behind.task is not None
    assert (behind.task.task_id, behind.task.epoch) == ("3", 0)


def test_asking_beyond_the_last_epoch_ends_training(lanes: TaskQueue) -> None:
    take_lane(lanes, "r", 0, 0, epoch=1)
    assert take_lane(lanes, "s", 0, 0, epoch=2).answer == "end"
    assert lanes.finished


def test_a_discarded_task_of_a_lane_is_skipped(lanes: TaskQueue) -> None:
    lanes.max_failures = 1
    take_lane(lanes, "r0", 0, 0)
    close(lanes, lanes.fail("0", 1, "t1", "boom"))
    assert take_lane(lanes, "r1", 0, 0) == TaskAnswer(
        answer="skip", reason="task 0 is discarded", stream_length=3
    )
    assert take_lane(lanes, "r2", 0, 1).answer == "task"


def test_gaps_in_a_lane_and_epochs_ahead_are_refused(lanes: TaskQueue) -> None:
    with pytest.raises(Conflict, match="only 0 were ever given"):
        lanes.dispatch_lane(ask(index=2, stream=0), 0)
    with pytest.raises(Conflict, match="epoch 2 is asked for, but epoch 0 is under way"):
        lanes.close_before(ask(epoch=2, stream=0))
