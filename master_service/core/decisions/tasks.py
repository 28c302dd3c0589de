"""Decisions about tasks: who is given which one, and what its end, its failure or its silence leads to; and
whether a report can be true.

complete_and_take: the end of a task and the next one in one transaction. When more ends than the task (an
epoch, a stage), no next one is taken: the trainer asks again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from master_service.core.changes import (
    Change,
    Decision,
    DropPending,
    Event,
    Fields,
    NextEpoch,
    PutPending,
    PutRequeued,
    RestartQueue,
)
from master_service.core.decisions import evaluation, lifecycle, recovery
from master_service.core.queue.task_queue import WAIT_S, Closing, TaskQueue
from master_service.core.state.job import BESIDE, Job
from master_service.core.state.kept import KEPT_EVENTS
from trireme_shared.protocol.errors import (
    InvalidArgument,
    NotFound,
    StaleAttempt,
    StaleGeneration,
    TriremeError,
)
from trireme_shared.protocol.evaluations import EvaluationStatus, why_unreported
from trireme_shared.protocol.events import MESSAGE
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    EvaluationSums,
    FailTask,
    JobState,
    MetricBatch,
    Mode,
    Phase,
    Stage,
    StepMetrics,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    UserFailure,
)
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.queue import FailureCounts
from trireme_shared.protocol.records.record import shortened

REQUEUES_AT_ONCE = 40
CAUSE_CHARACTERS = 1000


def acquire(job: Job, ask: AcquireTask) -> Decision[TaskAnswer]:
    """A task, "wait", "skip", "exhausted" or "end". Raises StaleGeneration, InvalidArgument, Conflict."""
    state = job.state
    if state.phase is not Phase.RUNNING:
        reason = f"the job is {state.phase}: {state.reason}"
        if state.phase.final:
            return Decision(TaskAnswer(answer="end", reason=reason))
        return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S))
    check_generation(job, ask)
    if ask.look:
        return Decision(_look(job, ask))
    if ask.beside:
        decision = evaluation.acquire(job, ask)
    else:
        decision = (
            _acquire_lane(job, ask, ask.stream) if ask.stream is not None else _acquire_shared(job, ask)
        )
    if (task := decision.answer.task) is None:
        return decision
    alone = job.budget.counts.has_died_at(task.epoch, task.task_id)
    following = _behind(job, task) if ask.stream is not None and not alone else None
    if not state.timeline and not alone and following is None:
        return decision
    task = task.with_fields(timeline=state.timeline, alone=alone)
    return replace(decision, answer=decision.answer.with_fields(task=task, following=following))


def _behind(job: Job, task: Task) -> Task | None:
    """What the lane may read ahead. None for a task at which a process has died: its records are read
    alone."""
    following = job.training.behind(task)
    if following is None or job.budget.counts.has_died_at(following.epoch, following.task_id):
        return None
    return following.with_fields(timeline=job.state.timeline)


def _acquire_shared(job: Job, ask: AcquireTask) -> Decision[TaskAnswer]:
    queue = job.due
    if queue is None:
        return Decision(TaskAnswer(answer="end", reason="the job is done"))
    if queue.by_lane:
        reason = "training gives tasks to lanes; evaluation and export come later"
        return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S))
    if queue.kind is TaskKind.EXPORT and job.evaluation.running is not None:
        reason = f"evaluation {job.evaluation.running.number} is under way; the export names the best one"
        return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S))
    ended = evaluation.stopping(job) if queue.kind is TaskKind.TRAIN else None
    if ended is not None and not queue.repeats.knows(ask.trainer, ask.request):
        reason = "training ends early: no other task is given"
        return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S)) + ended
    answer, changes = queue.dispatch(ask)
    if answer.answer == "end":  # this stage is closed and the next one not yet committed
        answer = TaskAnswer(answer="wait", reason=f"{job.state.stage} is closing", retry_after_s=WAIT_S)
    return Decision(answer, changes, tuple(_given_twice(changes)))


def _given_twice(changes: Iterable[Change]) -> Iterator[Event]:
    for change in changes:
        if isinstance(change, PutPending) and change.task.others:
            late, helper = change.task.others[0].trainer, change.task.trainer
            fields: Fields = {
                "task": change.task_id,
                "attempt": change.task.attempt,
                "trainer": helper,
                "late": late,
            }
            message = f"task {change.task_id} is late at {late}: it is given to {helper} too"
            yield Event("task_given_twice", message, fields)


def find_late(job: Job, now: float) -> int:
    """Marks the late tasks of an asynchronous job, in place and in memory only, once no other is left to
    give. How many there are."""
    queue = job.training
    waits = job.state.phase is not Phase.RUNNING or job.state.stage is not Stage.TRAIN or job.state.absent
    if job.spec.mode is not Mode.ASYNC or job.spec.stragglers == "off" or waits:
        return 0
    if queue.requeued or queue.dispatched < queue.total:
        return 0
    return queue.late.mark(queue.pending, now, job.spec.straggler_factor)


def close_epoch(job: Job, ask: AcquireTask) -> Decision[None]:
    """A lane that asks for the next epoch has pulled a version in which this one is over: the request proves
    its end."""
    if ask.stream is None or job.state.phase is not Phase.RUNNING or job.state.stage is not Stage.TRAIN:
        return Decision(None)
    check_generation(job, ask)
    if ask.stopped:
        return evaluation.stop(job, ask)
    changes = job.training.close_before(ask)
    return Decision(None, changes) + lifecycle.advance_stage(job, changes)


def report_progress(job: Job, task_id: str, report: TaskProgress) -> TaskQueue:
    """Answers the queue of the task; nothing is to be written. Raises StaleAttempt, NotFound."""
    queue = _queue_of(job, task_id, report)
    queue.check_attempt(task_id, report.attempt, report.trainer, report.epoch)
    return queue


def complete(job: Job, task_id: str, report: CompleteTask) -> Decision[None]:
    """Raises StaleAttempt, NotFound, TooLarge, InvalidArgument. Sums and exports are written in the
    transaction that ends the task: never twice."""
    queue = _queue_of(job, task_id, report)
    closing = queue.finish(task_id, report.attempt, report.trainer, report.epoch)
    if not closing.changes:
        return Decision(None)
    if queue.kind is TaskKind.TRAIN and recovery.is_outdated(job.state, report.generation):
        return _put_back(queue, task_id, "a parameter server came back from a checkpoint meanwhile")
    changes = closing.changes
    if job.budget.counts.has_died_at(queue.epoch, task_id):
        changes = (*changes, job.budget.counts.without(queue.epoch, task_id))
    if report.skipped and queue.kind is TaskKind.TRAIN:
        changes = (*changes, job.losses.with_skipped(report.skipped))
    if queue.kind is TaskKind.EVALUATE:
        changes = (*changes, job.sums.plus(report.sums, _number_of(task_id)).bounded())
    if queue.kind is TaskKind.VALIDATE:
        sums = job.validation.plus(report.sums, _number_of(task_id)).bounded()
        return Decision(None, (*changes, sums))
    if queue.kind is TaskKind.METRICS:
        return Decision(None, changes) + evaluation.settle(job, report)
    stopped = evaluation.stopping(job, task_id) if queue.kind is TaskKind.TRAIN and not closing.last else None
    if stopped is not None:
        return Decision(None, changes) + stopped
    ended = Decision(None, changes) + lifecycle.advance_stage(job, changes, last=closing.last, report=report)
    unreported = (
        why_unreported(job.spec, report.metrics) if queue.kind is TaskKind.EXPORT and not report.best else ""
    )
    if unreported and job.spec.keep_best is not None:
        ended += Decision(
            None, (), (Event("best_unknown", f"{unreported}: the last model alone is exported", {}),)
        )
    return ended


def fail_task(job: Job, task_id: str, report: FailTask) -> Decision[UserFailure | None]:
    """Raises StaleAttempt, NotFound. Answers the failure unless it was reported before; it also counts
    against the job's budget."""
    queue = _queue_of(job, task_id, report)
    cause = shortened(f"{report.failure.error_type}: {report.failure.message}", CAUSE_CHARACTERS)
    closing = queue.fail(task_id, report.attempt, report.trainer, cause, report.epoch)
    if not closing.changes:
        return Decision(None)
    where = report.failure.task or queue.streams.describe(task_id)
    failure = report.failure.with_fields(trainer=report.failure.trainer or report.trainer, task=where)
    ended = Decision(failure) + ended_badly(job, queue, task_id, cause, closing, failure)
    if evaluation.gives_up(queue.kind, failure):
        return ended  # no error of the script
    state = next((change for change in ended.changes if isinstance(change, JobState)), job.state)
    return ended + lifecycle.count_failure(job.known_budget, state, failure, in_task=True)


def expire(job: Job, now: float) -> Decision[list[str]]:
    """Tasks past their deadline are requeued or discarded; answers the trainers to evict.

    Lanes wait for each other, so only the one that is silent longest is to blame: its trainer is evicted (its
    lanes go to others), and the other tasks get a new deadline.
    """
    if job.state.phase is not Phase.RUNNING or job.state.absent:
        return Decision([])  # tasks are late through no fault of their trainers
    for queue in job.open_queues:
        if late := queue.overdue(now):
            return _expire(job, queue, late, now)
    return Decision([])


def _expire(job: Job, queue: TaskQueue, late: Sequence[str], now: float) -> Decision[list[str]]:
    blamed = late[:1] if queue.by_lane else late[:REQUEUES_AT_ONCE]
    evicted = [queue.pending[task_id].record.trainer for task_id in blamed] if queue.by_lane else []
    decision: Decision[list[str]] = Decision(evicted)
    for task_id in blamed:
        held = queue.pending[task_id]
        cause = f"silent for {now - held.last_sign:.1f} s at {held.record.trainer}"
        if queue.by_lane and not 0 < held.record.failures >= queue.max_failures - 1:
            # lanes wait for each other, so this may not be the one that hangs: that one is found by where its
            # process dies (discarded_tasks.py)
            decision += _put_back(queue, task_id, cause)
            continue
        closing = queue.give_up(task_id, cause)
        decision += ended_badly(job, queue, task_id, cause, closing, None)
        if closing.last or closing.discarded:
            break  # the next round sees the others, with this change applied
    return decision


def put_back_lost(job: Job) -> Decision[bool]:
    """Requeue tasks of trainers that are no longer members, REQUEUES_AT_ONCE at most. Answers whether more
    are left."""
    if job.state.phase is not Phase.RUNNING:
        return Decision(False)
    members = job.trainers
    found = (
        (queue, task_id, {each.trainer for each in p.record.attempts if each.trainer not in members})
        for queue in job.open_queues
        for task_id, p in queue.pending.items()
    )
    lost = [(queue, task_id, gone) for queue, task_id, gone in found if gone]
    decision: Decision[bool] = Decision(len(lost) > REQUEUES_AT_ONCE)
    for queue, task_id, gone in lost[:REQUEUES_AT_ONCE]:
        decision += _put_back(queue, task_id, " and ".join(map(job.members.absence, sorted(gone))), gone)
    return decision


def freed_by(changes: Iterable[Change]) -> int | None:
    """How many tasks these changes give back to the queue; None: perhaps any number, or those who wait get
    another answer now."""
    freed = 0
    for change in changes:
        if isinstance(change, JobState | NextEpoch | RestartQueue | EvaluationStatus):
            return None
        freed += isinstance(change, PutRequeued)
    return freed


def check_generation(job: Job, ask: AcquireTask) -> None:
    """The fence of dispatch. Raises StaleGeneration for a trainer that is not a member, that has not heard of
    the last roll-back (it would evaluate what it has from before, or take training for the export), or
    (lanes) that is of an older generation."""
    state = job.state
    if ask.trainer not in job.trainers:
        msg = (
            f"{ask.trainer} is no member of generation {state.generation}; register, and read the "
            "job's state again"
        )
        raise StaleGeneration(msg, generation=state.generation)
    if ask.generation < state.timeline:
        msg = (
            f"{ask.trainer} asks in generation {ask.generation}, before the job went back to a "
            f"checkpoint in {state.timeline}; read the job's state again"
        )
        raise StaleGeneration(msg, generation=state.generation)
    if ask.stream is None:
        return
    if ask.generation != state.generation:
        msg = (
            f"{ask.trainer} asks in generation {ask.generation}, now is {state.generation}; read lanes again"
        )
        raise StaleGeneration(msg, generation=state.generation)
    first, last = job.trainers.lanes_of(ask.trainer)
    if job.trainers.lanes and not ask.look and not first <= ask.stream < last:
        msg = (
            f"lane {ask.stream} is not of {ask.trainer} (lanes {first} to {last} exclusive) in "
            f"generation {state.generation}; read lanes again"
        )
        raise StaleGeneration(msg, generation=state.generation)


def complete_and_take(job: Job, task_id: str, report: CompleteTask) -> Decision[Completed]:
    """Raises StaleAttempt, NotFound, NotReady; then no task is given either. No next task is no error."""
    done = complete(job, task_id, report)
    taken = _taken(job, task_id, report, done)
    return Decision(Completed(next=taken.answer)) + done + taken


def ended_badly(
    job: Job, queue: TaskQueue, task_id: str, cause: str, closing: Closing, failure: UserFailure | None
) -> Decision[None]:
    """Events of a requeued or discarded task, and the job's failure when too much is discarded."""
    what = queue.streams.describe(task_id)
    if closing.discarded is None:
        failures = next(c.task.failures for c in closing.changes if isinstance(c, PutRequeued | PutPending))
        fields: Fields = {"task": task_id, "failures": failures, "cause": cause}
        return Decision(
            None, closing.changes, (Event("task_requeued", f"{what} goes back: {cause}", fields),)
        )
    records = queue.streams.records_of(task_id)
    fields = {"task": task_id, "records": records, "cause": cause, "epoch": closing.discarded.epoch}
    event = Event(
        "task_discarded", f"{what} is discarded after {closing.discarded.failures} failures: {cause}", fields
    )
    ended: Decision[None] = Decision(None, closing.changes, (event,))
    running = job.evaluation.running
    if running is not None and evaluation.gives_up(queue.kind, failure):
        return ended + recovery.give_up_evaluation(job, failure, cause)
    lost = lost_records(queue, task_id, closing.discarded.epoch)
    limit = job.spec.max_discarded_fraction * queue.streams.records
    if queue.kind in (TaskKind.EXPORT, TaskKind.METRICS):
        named = "the export" if queue.kind is TaskKind.EXPORT else "metrics(sums) of an evaluation"
        return ended + lifecycle.fail(
            job.state,
            f"{named} failed {closing.discarded.failures} times: {cause}",
            lifecycle.cause_of(failure),
            failure,
        )
    if lost > limit:
        reason = (
            f"{lost} of {queue.streams.records} records of epoch {closing.discarded.epoch} are "
            "discarded, more than "
            f"max_discarded_fraction {job.spec.max_discarded_fraction:g}; the last: {what}: {cause}"
        )
        return ended + lifecycle.fail(job.state, reason, lifecycle.cause_of(failure), failure)
    if queue.kind is TaskKind.VALIDATE:
        return ended
    return ended + lifecycle.advance_stage(job, closing.changes, last=closing.last)


def lost_records(queue: TaskQueue, task_id: str, epoch: int) -> int:
    """Records of the epoch that are discarded once this task is, too."""
    return queue.streams.records_of(task_id) + sum(
        d.records for d in queue.discarded.values() if d.task.epoch == epoch
    )


# -------------------------------------------------------------------- parts


def _taken(job: Job, task_id: str, report: CompleteTask, done: Decision[None]) -> Decision[Task | None]:
    """The next task, decided while `job` still holds the one that ends: its end must not matter for what is
    given."""
    nothing: Decision[Task | None] = Decision(None)
    if report.next is None or not all(
        isinstance(change, DropPending | Losses | EvaluationSums | FailureCounts) for change in done.changes
    ):
        return nothing
    held = job.queue_of(task_id).pending.get(task_id)
    if (
        done.changes
        and held is not None
        and any(each.request == report.next.request for each in held.record.attempts)
    ):
        return nothing  # the same request got the task that ends now
    beside = job.queue_of(task_id).kind in BESIDE
    ask = AcquireTask(
        trainer=report.trainer, request=report.next.request, generation=report.next.generation, beside=beside
    )
    try:
        found = acquire(job, ask)
    except TriremeError:
        return nothing
    return Decision(found.answer.task, found.changes, found.events)


def _number_of(task_id: str) -> int:
    """`validate-3` is the evaluation's task 3."""
    return int(task_id.rpartition("-")[2])


def _queue_of(job: Job, task_id: str, report: TaskProgress | CompleteTask | FailTask) -> TaskQueue:
    """Attempts are counted from 1 again after a rollback. Raises StaleAttempt for a report from before it,
    NotFound."""
    queue = job.queue_of(task_id)
    if report.timeline is not None and report.timeline != job.state.timeline:
        msg = (
            f"task {task_id} attempt {report.attempt} of {report.trainer} is stale: it was given in timeline "
            f"{report.timeline}, the job has gone back to a checkpoint in timeline "
            f"{job.state.timeline}; fetch a new task"
        )
        raise StaleAttempt(msg)
    return queue


def _acquire_lane(job: Job, ask: AcquireTask, lane: int) -> Decision[TaskAnswer]:
    if job.state.stage is not Stage.TRAIN:
        return Decision(TaskAnswer(answer="end", reason="training is over"))
    if job.spec.mode is not Mode.SYNC or not 0 <= lane < job.spec.lanes:
        msg = (
            f"stream {lane} does not exist: the job is {job.spec.mode} with {job.spec.lanes} lanes; "
            "ask with stream null"
        )
        raise InvalidArgument(msg)
    answer, changes = job.training.dispatch_lane(ask, lane)
    return Decision(answer, changes) + lifecycle.advance_stage(job, changes)


def _look(job: Job, ask: AcquireTask) -> TaskAnswer:
    """The task at that place, if the lane's owner has it, or had it: not one that is put back, discarded or
    not given yet. Raises InvalidArgument."""
    lane = ask.stream if ask.stream is not None else -1
    if job.spec.mode is not Mode.SYNC or not 0 <= lane < job.spec.lanes:
        msg = (
            f"stream {ask.stream} cannot be looked at: the job is {job.spec.mode} with "
            f"{job.spec.lanes} lanes; name a lane"
        )
        raise InvalidArgument(msg)
    queue = job.training
    streams, cursor = queue.streams, queue.cursors.get(queue.streams.name(lane), 0)
    given = ask.epoch == queue.epoch and 0 <= ask.index < min(cursor, streams.length(lane))
    task_id = streams.at(ask.epoch, lane, ask.index) if given else ""
    if not given or task_id in queue.requeued or (ask.epoch, task_id) in queue.discarded:
        reason = f"lane {lane} has no task {ask.index} of epoch {ask.epoch} under way"
        return TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S)
    held = queue.pending.get(task_id)
    task = streams.task(task_id, held.record.attempt if held else 1, ask.epoch, lane, ask.index)
    task = task.with_fields(timeline=job.state.timeline)
    return TaskAnswer(answer="task", task=task, stream_length=task.stream_length)


def _put_back(
    queue: TaskQueue, task_id: str, cause: str, lost: Collection[str] | None = None
) -> Decision[None]:
    changes = queue.put_back(task_id, cause, lost)
    if not any(isinstance(change, PutRequeued) for change in changes):
        return Decision(None, changes)  # another trainer has it too
    event = Event("task_requeued", f"task {task_id} goes back: {cause}", {"task": task_id, "cause": cause})
    return Decision(None, changes, (event,))


# -------------------------------------------------- reports that are about no task, so no attempt fences them


def current_metrics(job: Job, batch: MetricBatch) -> MetricBatch:
    """Without steps that a rollback undid, and the times they took: their report is late. Raises NotFound
    unless a trainer of the job sends it; InvalidArgument for a step that the job cannot have."""
    check_trainer(job, batch.trainer)
    current = tuple(share for share in batch.steps if share.timeline == job.state.timeline)
    for share in current:
        if wrong := _impossible(job, share):
            raise InvalidArgument(
                f"{batch.trainer} reports step {share.step} of epoch {share.epoch}: {wrong}"
            )
    times = batch.times if batch.times is not None and batch.times.timeline == job.state.timeline else None
    if times is not None and not 0 <= times.step < most_steps(job):
        raise InvalidArgument(
            f"{batch.trainer} reports step {times.step}: the job has at most {most_steps(job)} steps"
        )
    return batch.with_fields(steps=current, times=times)


def warnings_told(job: Job, warnings: Sequence[str]) -> Decision[None]:
    """As events of the job, without those that are among its events."""
    told = {event.message for event in job.events.after(0, KEPT_EVENTS) if event.name == "warning"}
    new = [text for text in dict.fromkeys(shortened(text, MESSAGE) for text in warnings) if text not in told]
    return Decision(None, (), tuple(Event("warning", text) for text in new))


def check_failure(member_id: str, failure: UserFailure) -> None:
    """Raises InvalidArgument for a failure without a name, or of another trainer than the one that reports
    it."""
    if failure.trainer not in ("", member_id):
        raise InvalidArgument(
            f"{member_id} reports a failure of {failure.trainer}; each trainer reports its own"
        )
    if not failure.error_type.strip():
        raise InvalidArgument(f"{member_id} reports a failure without error_type; name the exception")


def check_trainer(job: Job, member_id: str) -> None:
    """Raises NotFound."""
    if member_id not in job.members.trainers and member_id not in job.trainers:
        raise NotFound(
            f"no trainer {member_id} is registered in job {job.spec.job}; only trainers report "
            "what they trained"
        )


def most_steps(job: Job) -> int:
    """The job has no more steps: every task of the longest stream, in every epoch."""
    streams, spec = job.training.streams, job.spec
    longest = max(streams.length(number) for number in range(streams.count))
    task_records = streams.table.task_records if streams.table is not None else 0
    return spec.epochs * longest * -(-task_records // spec.minibatch_size)


def _impossible(job: Job, share: StepMetrics) -> str:
    """Why the job cannot have such a step, or ""."""
    records, most = job.training.streams.records, most_steps(job)
    if not 0 <= share.step < most:
        return f"the job has at most {most} steps, numbered from 0"
    if not 0 <= share.epoch <= job.training.epoch:
        return f"epoch {job.training.epoch} is under way"
    if not 0 <= share.records <= records:
        return f"it has {share.records} records, an epoch has {records}"
    return "" if math.isfinite(share.loss_sum) else f"its loss_sum is {share.loss_sum}"
