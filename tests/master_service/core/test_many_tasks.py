"""What a master decides does not take longer when there are many tasks: a look at all of them would not end
within a test's limit."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from master_service.core.changes import PutCursor, PutDiscarded, PutPending, PutRequeued
from master_service.core.decisions.queue_at_checkpoint import CutQueue, missed_minibatches, records_since_cut
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.queue.open_tasks import RequeuedTasks
from master_service.core.state.job import Job
from tests.master_service.cluster import spec_of
from trireme_shared.protocol.records import AcquireTask, DiscardedTask, PendingTask, RequeuedTask
from trireme_shared.protocol.records.job import Losses

MANY = 10**9
EPOCHS = 4
TASK_RECORDS = 5
MINIBATCH = 2


def back_at(index: int, epoch: int = 0) -> RequeuedTask:
    return RequeuedTask(attempts=1, failures=0, cause="c", stream="0", epoch=epoch, index=index)


def job_of(files: tuple[int, ...], task_records: int = TASK_RECORDS, seed: int = 0) -> Job:
    spec = spec_of(
        epochs=EPOCHS, records_per_task=task_records, global_batch_size=MINIBATCH, seed=seed, lanes=1
    )
    return Job.open(
        spec, FileTable(tuple(TableFile(f"{n}", count) for n, count in enumerate(files)), task_records), None
    )


def counted_one_by_one(job: Job, cut: CutQueue, positions: Mapping[str, int]) -> tuple[int, int]:
    """(missed minibatches, records since the cut), with a look at every task."""
    queue, minibatches, records = job.training, 0, 0
    for epoch in range(cut.epoch, min(queue.epoch + 1, EPOCHS)):
        first = cut.cursor if epoch == cut.epoch else 0
        last = queue.cursors.get("0", 0) if epoch == queue.epoch else queue.total
        given_out = [queue.streams.at(epoch, 0, index) for index in range(first, last)]
        for task_id in [*cut.open, *given_out] if epoch == cut.epoch else given_out:
            under_way = epoch == queue.epoch and (task_id in queue.pending or task_id in queue.requeued)
            if under_way or (epoch, task_id) in queue.discarded:
                continue
            count = queue.streams.records_of(task_id)
            records += count
            had = positions.get(task_id, 0) if epoch == cut.epoch else 0
            minibatches += max(0, -(-count // MINIBATCH) - had) if had >= 0 else 0
    return minibatches, records


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_was_done_since_a_cut_is_the_sum_over_all_tasks(data: st.DataObject) -> None:
    job = job_of(
        tuple(data.draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))),
        seed=data.draw(st.integers(0, 9)),
    )
    queue = job.training
    total = queue.total
    cut_epoch = data.draw(st.integers(0, EPOCHS - 1))
    queue.epoch = data.draw(st.integers(cut_epoch, EPOCHS))
    cut_cursor = data.draw(st.integers(0, total))
    least = cut_cursor if queue.epoch == cut_epoch else 0
    cursor = data.draw(st.integers(least, total)) if queue.epoch < EPOCHS else 0
    queue.apply(PutCursor("0", cursor), 0.0)
    now = (
        [queue.streams.at(queue.current, 0, index) for index in range(cursor)] if queue.epoch < EPOCHS else []
    )
    for place, task_id in enumerate(now):
        match data.draw(st.sampled_from(["done", "done", "pending", "requeued", "discarded"])):
            case "pending":
                record = PendingTask(
                    attempt=1,
                    trainer="t",
                    stream="0",
                    epoch=queue.epoch,
                    index=place,
                    remaining_s=1,
                    failures=0,
                    request="",
                )
                queue.apply(PutPending(task_id, record), 0.0)
            case "requeued":
                queue.apply(PutRequeued(task_id, back_at(place, queue.epoch)), 0.0)
            case "discarded":
                lost = DiscardedTask(
                    attempts=1, failures=3, cause="c", epoch=queue.epoch, stream="0", index=place
                )
                queue.apply(PutDiscarded(task_id, lost, queue.streams.records_of(task_id)), 0.0)
    before = [queue.streams.at(cut_epoch, 0, index) for index in range(cut_cursor)]
    opened = data.draw(st.lists(st.sampled_from(before), unique=True)) if before else []
    cut = CutQueue(cut_epoch, cut_cursor, {task_id: back_at(0) for task_id in opened}, {}, Losses())
    positions = {task_id: data.draw(st.integers(-1, 3)) for task_id in opened}
    expected = counted_one_by_one(job, cut, positions)
    assert (missed_minibatches(job, cut, positions), records_since_cut(job, cut)) == expected


def test_losses_of_a_billion_records_are_counted_at_once() -> None:
    job = job_of((MANY // 2, MANY // 2), task_records=1)
    queue = job.training
    queue.epoch = 2
    queue.apply(PutCursor("0", MANY - 7), 0.0)
    queue.apply(PutRequeued(queue.streams.at(2, 0, 5), back_at(5, 2)), 0.0)
    cut = CutQueue(0, 3, {}, {}, Losses())
    done = (MANY - 3) + MANY + (MANY - 7) - 1
    assert (missed_minibatches(job, cut, {}), records_since_cut(job, cut)) == (done, done)


def test_a_requeued_task_is_found_however_many_there_are() -> None:
    count = 50_000
    job = job_of((count,), task_records=1)
    queue = job.training
    queue.apply(PutCursor("0", count), 0.0)
    for index in reversed(range(count)):
        queue.apply(PutRequeued(queue.streams.at(0, 0, index), back_at(index)), 0.0)
    for index in range(1000):
        answer, changes = queue.dispatch(AcquireTask(trainer="t", request=f"r{index}", generation=1))
        assert answer.task is not None
        assert answer.task.index == index
        for change in changes:
            queue.apply(change, 0.0)


@given(events=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_the_first_requeued_task_is_the_one_with_the_lowest_index(events: list[tuple[int, bool]]) -> None:
    tasks = RequeuedTasks()
    for index, put in events:
        if put:
            tasks[f"{index}"] = back_at(index)
        else:
            tasks.pop(f"{index}", None)
        for each in (tasks, tasks.copy()):
            if each:
                task_id, _ = each.first()
                assert int(task_id) == min(map(int, each))
