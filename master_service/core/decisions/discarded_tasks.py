"""Tasks that are discarded, or given again, for another reason than their own failures. Decisions only.

users' requests    DISCARDED --retry--> REQUEUED
                   PENDING, REQUEUED --skip--> DISCARDED (a lane's task: once its present attempt fails)
deadly records     a process dies ─► its successor reports the minibatch that it had begun
                       ─► counted by task, in a row at one minibatch
                   a trainer completes the task ─► forgotten
                   LEAST_DEATHS in a row at one minibatch ─► discarded when it is to be given again

Requests are for the epoch that is under way, and change nothing if it is so already. Deadly records end the
process which computes them (a crash in C, exit, out of memory, a hang): they are found by where processes
die. Deaths from outside hit a minibatch by chance. It would take LEAST_DEATHS of them in a row at the same
one, before anybody gets past it. What else the dead process had begun is counted too, and is read by itself
from then on (`Task.alone`), so it is counted once or twice at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from master_service.core.changes import (
    Change,
    Decision,
    DropDiscarded,
    DropPending,
    DropRequeued,
    Event,
    Fields,
    NextEpoch,
    PutDiscarded,
    PutPending,
    PutRequeued,
)
from master_service.core.decisions.tasks import check_generation, ended_badly, lost_records
from master_service.core.queue.task_queue import Closing, TaskQueue
from master_service.core.state.job import Job
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotReady
from trireme_shared.protocol.records import (
    AcquireTask,
    DiscardedTask,
    FailTask,
    Phase,
    RequeuedTask,
    TaskKind,
    UserFailure,
)
from trireme_shared.protocol.records.queue import Deaths
from trireme_shared.protocol.records.record import shortened


@dataclass(frozen=True, slots=True)
class AskedTask:
    """The task as it is then. `record`: None where it is as before. `failures`: of one that stays with its
    trainer."""

    task_id: str
    state: str
    record: RequeuedTask | DiscardedTask | None = None
    failures: int | None = None


def retry(job: Job, task_id: str, by: str) -> Decision[AskedTask]:
    """A new attempt resumes where the ledgers say, so no minibatch counts twice. `by`: who asks, for people.
    Raises NotFound, NotReady, Conflict for a task that is not discarded, or that a lane has passed."""
    queue, state = _open_queue(job, task_id), job.queue_of(task_id).state_of(task_id)
    if state in ("PENDING", "REQUEUED"):
        return Decision(AskedTask(task_id, state))
    if state != "DISCARDED":
        _refuse(queue, task_id, state, "tried again", "DISCARDED")
    if queue.by_lane:
        msg = (
            f"task {task_id} cannot be tried again: its lane has gone on, and records of a lane are "
            "trained in their order"
        )
        raise Conflict(msg, hint="restoreCheckpoint goes back to before it; or start another job")
    lost = queue.discarded[queue.epoch, task_id].task
    drop, cause = DropDiscarded(task_id, queue.epoch), f"tried again, {by}"
    event = Event("task_requeued", f"task {task_id} goes back: {cause}", {"task": task_id, "cause": cause})
    # it is still to come, since the job went back
    if lost.index >= queue.cursors.get(queue.streams.name(0), 0):
        return Decision(AskedTask(task_id, "TODO"), (drop,), (event,))
    back = RequeuedTask(
        attempts=lost.attempts,
        failures=0,
        cause=cause,
        stream=lost.stream,
        epoch=lost.epoch,
        index=lost.index,
    )
    return Decision(AskedTask(task_id, "REQUEUED", back), (drop, PutRequeued(task_id, back)), (event,))


def skip(job: Job, task_id: str, by: str) -> Decision[AskedTask]:
    """Raises NotFound, NotReady, Conflict for a task that is done, that nobody has tried yet, or whose
    records are more than the job may lose."""
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
    """Raises NotFound; NotReady while the job stands still; Conflict if its stage or its epochs are over, or
    not there yet."""
    queue = job.queue_of(task_id)
    if job.state.phase.final:
        raise Conflict(f"task {task_id} cannot change: the job is {job.state.phase}")
    if job.state.phase is not Phase.RUNNING:
        raise NotReady(f"the job is {job.state.phase}: {job.state.reason}; ask again when it runs")
    if queue is not job.due or queue.epoch >= queue.epochs:
        raise Conflict(
            f"task {task_id} cannot change: {queue.kind} is not what the job does now ({job.state.stage})"
        )
    return queue


def _refuse(queue: TaskQueue, task_id: str, state: str, what: str, states: str) -> NoReturn:
    """Raises Conflict."""
    before = [epoch for epoch, name in queue.discarded if name == task_id]
    past = f"; it was discarded in epoch {max(before)}, which is over" if before else ""
    raise Conflict(f"task {task_id} is {state} in epoch {queue.epoch}{past}: {states} tasks can be {what}")


def _check_loss(job: Job, queue: TaskQueue, task_id: str) -> None:
    """Nobody asks for the end of the job in this way. Raises Conflict."""
    if queue.kind is TaskKind.EXPORT:
        raise Conflict(
            f"task {task_id} cannot be skipped: without its export the job fails", hint="cancel the job"
        )
    lost, limit = (
        lost_records(queue, task_id, queue.epoch),
        job.spec.max_discarded_fraction * queue.streams.records,
    )
    if lost > limit:
        msg = (
            f"with task {task_id} {lost} of {queue.streams.records} records of epoch {queue.epoch} "
            "would be discarded, more "
            f"than max_discarded_fraction {job.spec.max_discarded_fraction:g}: the job would fail"
        )
        raise Conflict(msg, hint="start the job with a larger max_discarded_fraction")


def _last_attempt(queue: TaskQueue, task_id: str, state: str, cause: str) -> Decision[AskedTask]:
    """Parameter servers may have data of a lane's attempt that is under way: its trainer has to end it
    first."""
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


LEAST_DEATHS = 3
MOST_PLACES = 128
REMEMBERED = 16  # processes that died at one place
NAME_CHARACTERS = 200
CAUSE_CHARACTERS = 400  # all places are in one key
DIED = "ProcessDied"


def count(job: Job, task_id: str, report: FailTask) -> Decision[UserFailure | None]:
    """One more death at `report.died_at`. None if it was counted before. Nothing is discarded here: another
    trainer may be past that place. Raises NotFound; InvalidArgument for a place that the job cannot have."""
    assert report.died_at is not None
    queue, counts = job.queue_of(task_id), job.budget.counts
    epoch = queue.epoch if report.epoch is None else report.epoch
    if report.died_at < -1 or not 0 <= epoch < queue.epochs:
        msg = (
            f"{report.trainer} reports a death at minibatch {report.died_at} of epoch {epoch}: the "
            f"queue has {queue.epochs} epochs"
        )
        raise InvalidArgument(msg)
    before = next((each for each in counts.deaths if (each.epoch, each.task_id) == (epoch, task_id)), None)
    in_a_row = before is not None and before.minibatch == report.died_at
    trainers = before.trainers if before is not None and in_a_row else ()
    if report.trainer in trainers:
        return Decision(None)
    cause, limit = shortened(report.failure.message, CAUSE_CHARACTERS), limit_of(job, task_id, epoch)
    trainers = (*trainers, shortened(report.trainer, NAME_CHARACTERS))[-max(limit, REMEMBERED) :]
    now = Deaths(epoch=epoch, task_id=task_id, minibatch=report.died_at, trainers=trainers, cause=cause)
    others = tuple(each for each in counts.deaths if each is not before)[-MOST_PLACES + 1 :]
    fields: Fields = {
        "task": task_id,
        "minibatch": report.died_at,
        "deaths": len(now.trainers),
        "cause": cause,
    }
    message = (
        f"{cause}; deaths in a row at this place: {len(now.trainers)}, its task is discarded after {limit}"
    )
    event = Event("died_at_task", message, fields)
    changed = counts.with_fields(deaths=(*others, now))
    return Decision(report.failure, (changed,), (event,))


def limit_of(job: Job, task_id: str, epoch: int) -> int:
    """After how many deaths in a row at one place the task is discarded: after the first one if it was
    discarded for that in an epoch before, so that a deadly record does not cost LEAST_DEATHS restarts in each
    epoch."""
    least = max(LEAST_DEATHS, job.spec.max_task_failures)
    known = any(
        each.task_id == task_id and each.epoch < epoch and len(each.trainers) >= least
        for each in job.budget.counts.deaths
    )
    return 1 if known else least


def discard_deadly(job: Job, ask: AcquireTask) -> Decision[None]:
    """Discards a task at which too many processes died, before `ask` can get it. A lane's task is asked for
    by the lane's owner, so nobody else has it; of a shared stream, one that was put back. Raises
    StaleGeneration."""
    deaths = job.budget.counts.deaths
    if not deaths or ask.look or job.state.phase is not Phase.RUNNING:
        return Decision(None)
    check_generation(job, ask)
    for queue in _asked(job, ask):
        due = queue.requeued if ask.stream is None else _of_lane(queue, ask.stream, ask)
        for each in deaths:
            of_queue = each.task_id in due and each.epoch == queue.epoch
            if of_queue and len(each.trainers) >= limit_of(job, each.task_id, each.epoch):
                return _discard(job, queue, each)
    return Decision(None)


def _asked(job: Job, ask: AcquireTask) -> Iterable[TaskQueue]:
    """The queues that `ask` may get a task of."""
    if ask.stream is not None:
        return (job.training,) if job.training.by_lane else ()
    return job.beside if ask.beside else tuple(filter(None, (job.due,)))


def _of_lane(queue: TaskQueue, lane: int, ask: AcquireTask) -> tuple[str, ...]:
    """The task that `ask` names, unless it is discarded already, or of an epoch that is over."""
    if ask.epoch != queue.epoch or not 0 <= ask.index < queue.streams.length(lane):
        return ()
    task_id = queue.streams.at(ask.epoch, lane, ask.index)
    return () if (ask.epoch, task_id) in queue.discarded else (task_id,)


def _discard(job: Job, queue: TaskQueue, deadly: Deaths) -> Decision[None]:
    task_id, number = deadly.task_id, len(deadly.trainers)
    cause = f"{number} processes died at it, the last: {deadly.cause}"
    stream, index = queue.streams.place(queue.epoch, task_id)
    held, back = queue.pending.get(task_id), queue.requeued.get(task_id)
    lost = DiscardedTask(
        attempts=held.record.attempt if held is not None else back.attempts if back is not None else number,
        failures=number,
        cause=cause,
        epoch=queue.epoch,
        stream=queue.streams.name(stream),
        index=index,
    )
    dropped: tuple[Change, ...] = (DropPending(task_id),) if held is not None else ()
    dropped = (*dropped, DropRequeued(task_id)) if back is not None else dropped
    changes: tuple[Change, ...] = (*dropped, PutDiscarded(task_id, lost, queue.streams.records_of(task_id)))
    last = (
        not queue.by_lane
        and queue.dispatched == queue.total
        and not queue.pending
        and queue.requeued.keys() == {task_id}
    )
    if last and queue.kind is TaskKind.TRAIN:
        changes = (*changes, NextEpoch(queue.epoch + 1))
    failure = UserFailure(error_type=DIED, message=cause, task=queue.streams.describe(task_id))
    return ended_badly(job, queue, task_id, cause, Closing(changes, last, lost), failure)
