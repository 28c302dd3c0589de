"""Users' requests about one task: try a discarded one again, give one up that fails or hangs. Decisions only.

DISCARDED --retry--> REQUEUED        PENDING, REQUEUED --skip--> DISCARDED (a lane's task: once its present attempt fails)

Both are for the epoch that is under way, and change nothing if it is so already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from master_service.core.changes import (
    Change,
    Decision,
    DropDiscarded,
    DropRequeued,
    Event,
    NextEpoch,
    PutDiscarded,
    PutPending,
    PutRequeued,
)
from master_service.core.decisions.tasks import ended_badly, lost_records
from master_service.core.queue.task_queue import Closing, TaskQueue
from master_service.core.state.job import Job
from trireme_shared.protocol.errors import Conflict, NotReady
from trireme_shared.protocol.records import DiscardedTask, Phase, RequeuedTask, TaskKind


@dataclass(frozen=True, slots=True)
class AskedTask:
    """The task as it is then. `record`: None where it is as before. `failures`: of one that stays with its trainer."""

    task_id: str
    state: str
    record: RequeuedTask | DiscardedTask | None = None
    failures: int | None = None


def retry(job: Job, task_id: str, by: str) -> Decision[AskedTask]:
    """A new attempt resumes where the ledgers say, so no minibatch counts twice. `by`: who asks, for people. Raises NotFound, NotReady,
    Conflict for a task that is not discarded, or that a lane has passed."""
    queue, state = _open_queue(job, task_id), job.queue_of(task_id).state_of(task_id)
    if state in ("PENDING", "REQUEUED"):
        return Decision(AskedTask(task_id, state))
    if state != "DISCARDED":
        _refuse(queue, task_id, state, "tried again", "DISCARDED")
    if queue.by_lane:
        msg = f"task {task_id} cannot be tried again: its lane has gone on, and records of a lane are trained in their order"
        raise Conflict(msg, hint="restoreCheckpoint goes back to before it; or start another job")
    lost = queue.discarded[queue.epoch, task_id].task
    drop, cause = DropDiscarded(task_id, queue.epoch), f"tried again, {by}"
    event = Event("task_requeued", f"task {task_id} goes back: {cause}", {"task": task_id, "cause": cause})
    if lost.index >= queue.cursors.get(queue.streams.name(0), 0):  # it is still to come, since the job went back
        return Decision(AskedTask(task_id, "TODO"), (drop,), (event,))
    back = RequeuedTask(
        attempts=lost.attempts, failures=0, cause=cause, stream=lost.stream, epoch=lost.epoch, index=lost.index
    )
    return Decision(AskedTask(task_id, "REQUEUED", back), (drop, PutRequeued(task_id, back)), (event,))


def skip(job: Job, task_id: str, by: str) -> Decision[AskedTask]:
    """Raises NotFound, NotReady, Conflict for a task that is done, that nobody has tried yet, or whose records are more than the job may
    lose."""
    queue, state = _open_queue(job, task_id), job.queue_of(task_id).state_of(task_id)
    if state == "DISCARDED":
        return Decision(AskedTask(task_id, state))
    if state not in ("PENDING", "REQUEUED"):
        _refuse(queue, task_id, state, "skipped", "PENDING or REQUEUED")
    _check_loss(job, queue, task_id)
    cause = f"skipped, {by}"
    if queue.by_lane:
        return _last_attempt(queue, task_id, state, cause)
    if state == "PENDING":
        closing = queue.give_up(task_id, cause, spent=True)
    else:
        closing = _give_up_requeued(queue, task_id, cause)
    ended = ended_badly(job, queue, task_id, cause, closing, None)
    return Decision(AskedTask(task_id, "DISCARDED", closing.discarded)) + ended


def _open_queue(job: Job, task_id: str) -> TaskQueue:
    """Raises NotFound; NotReady while the job stands still; Conflict if its stage or its epochs are over, or not there yet."""
    queue = job.queue_of(task_id)
    if job.state.phase.final:
        raise Conflict(f"task {task_id} cannot change: the job is {job.state.phase}")
    if job.state.phase is not Phase.RUNNING:
        raise NotReady(f"the job is {job.state.phase}: {job.state.reason}; ask again when it runs")
    if queue is not job.due or queue.epoch >= queue.epochs:
        raise Conflict(f"task {task_id} cannot change: {queue.kind} is not what the job does now ({job.state.stage})")
    return queue


def _refuse(queue: TaskQueue, task_id: str, state: str, what: str, states: str) -> NoReturn:
    """Raises Conflict."""
    before = [epoch for epoch, name in queue.discarded if name == task_id]
    past = f"; it was discarded in epoch {max(before)}, which is over" if before else ""
    raise Conflict(f"task {task_id} is {state} in epoch {queue.epoch}{past}: {states} tasks can be {what}")


def _check_loss(job: Job, queue: TaskQueue, task_id: str) -> None:
    """Nobody asks for the end of the job in this way. Raises Conflict."""
    if queue.kind is TaskKind.EXPORT:
        raise Conflict(f"task {task_id} cannot be skipped: without its export the job fails", hint="cancel the job")
    lost, limit = lost_records(queue, task_id, queue.epoch), job.spec.max_discarded_fraction * queue.streams.records
    if lost > limit:
        msg = (
            f"with task {task_id} {lost} of {queue.streams.records} records of epoch {queue.epoch} would be discarded, more "
            f"than max_discarded_fraction {job.spec.max_discarded_fraction:g}: the job would fail"
        )
        raise Conflict(msg, hint="start the job with a larger max_discarded_fraction")


def _last_attempt(queue: TaskQueue, task_id: str, state: str, cause: str) -> Decision[AskedTask]:
    """Parameter servers may have data of a lane's attempt that is under way: its trainer has to end it first."""
    failures = queue.max_failures - 1
    changes: tuple[Change, ...]
    if held := queue.pending.get(task_id):
        changes = (PutPending(task_id, held.record.with_fields(failures=failures)),)
        asked = AskedTask(task_id, state, failures=failures)
    else:
        back = queue.requeued[task_id].with_fields(failures=failures)
        changes, asked = (PutRequeued(task_id, back),), AskedTask(task_id, state, back)
    message = f"task {task_id} is discarded if its present attempt fails: {cause}"
    event = Event("task_last_attempt", message, {"task": task_id, "cause": cause})
    return Decision(asked, changes, (event,))


def _give_up_requeued(queue: TaskQueue, task_id: str, cause: str) -> Closing:
    back = queue.requeued[task_id]
    told = back.model_dump(exclude={"cause"})
    lost = DiscardedTask(**told, cause=cause)
    changes: tuple[Change, ...] = (
        DropRequeued(task_id),
        PutDiscarded(task_id, lost, queue.streams.records_of(task_id)),
    )
    last = queue.dispatched == queue.total and not queue.pending and queue.requeued.keys() == {task_id}
    if last and queue.kind is TaskKind.TRAIN:
        changes = (*changes, NextEpoch(queue.epoch + 1))
    return Closing(changes, last, lost)
