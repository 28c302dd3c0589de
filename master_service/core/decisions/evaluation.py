"""Evaluations while a job trains: when one begins, what it gave, what a rollback undoes.

checkpoint of its version committed ─ begin ─► VALIDATE tasks ─► METRICS task ─ settle ─► Evaluation; trainers may go on behind the
next such version     checkpoint lost, or damaged ─ leave_out ─► the same, without a result     rollback ─ rewind ─► forgotten
"""

from __future__ import annotations

import math
from dataclasses import replace

from master_service.core.changes import (
    Change,
    Decision,
    DropEvaluation,
    DropEvaluationsAfter,
    Event,
    Fields,
    RestartQueue,
)
from master_service.core.queue.task_queue import WAIT_S
from master_service.core.state.job import BESIDE, Job
from shared.errors import CheckpointUnusable, StorageUnreachable
from shared.evaluations import MOST_METRICS, Evaluation, EvaluationStatus, RunningEvaluation, better
from shared.records import (
    AcquireTask,
    CompleteTask,
    JobSpec,
    JobState,
    Phase,
    Stage,
    TaskAnswer,
    TaskKind,
    UserFailure,
    ValidationSums,
)
from shared.records.checkpoints import CheckpointRef, history

KEPT = 1000
RECENT = 2
SHOWN = 4


def begin(job: Job) -> Decision[bool]:
    """The next evaluation whose checkpoint is there. Answers whether one has begun."""
    state, status = job.state, job.evaluation
    stands = state.phase is not Phase.RUNNING or state.stage not in (Stage.TRAIN, Stage.EVALUATE)
    if stands or job.spec.evaluate_every is None or status.running is not None or status.timeline != state.timeline:
        return Decision(False)
    ref = next_due(job)
    if ref is None:
        return Decision(False)
    running = status.model_copy(
        update={"settled": ref.evaluation - 1, "running": RunningEvaluation(number=ref.evaluation, ref=ref)}
    )
    fields: Fields = {"number": ref.evaluation, "step": ref.step}
    told = [Event("evaluation_begun", f"evaluation {ref.evaluation} begins: step {ref.step}", fields)]
    if (missing := ref.evaluation - 1 - status.settled) > 0:
        message = (
            f"{missing} evaluations before number {ref.evaluation} are left out: their checkpoints were not written"
        )
        told.insert(0, Event("evaluation_left_out", message, {"number": ref.evaluation - 1}))
    return Decision(True, (*_emptied(job), running), tuple(told))


def next_due(job: Job) -> CheckpointRef | None:
    """The checkpoint of the first evaluation that is not settled, if it is committed."""
    latest, state = job.members.latest, job.state
    mine = history(latest.kept, state.timeline, state.checkpoint) if latest is not None else ()
    due = [ref for ref in mine if ref.evaluation > job.evaluation.settled and ref.uuid not in state.damaged]
    return min(due, key=lambda ref: ref.evaluation, default=None)


def acquire(job: Job, ask: AcquireTask) -> Decision[TaskAnswer]:
    """A task of the evaluation that runs; "wait" while it is under way, or `ask.epoch` is not settled; else "end"."""
    status = job.evaluation
    if status.running is None:
        if ask.epoch <= status.settled:
            return Decision(TaskAnswer(answer="end", reason="no evaluation is under way"))
        reason = f"evaluation {ask.epoch} begins once the checkpoint of its step is written"
        return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S))
    for queue in job.beside:
        answer, changes = queue.dispatch(ask)
        if answer.task is not None:
            return Decision(answer, changes)
        if answer.answer != "end":
            break
    reason = f"the last tasks of evaluation {status.running.number} are under way"
    return Decision(TaskAnswer(answer="wait", reason=reason, retry_after_s=WAIT_S))


def settle(job: Job, report: CompleteTask) -> Decision[None]:
    """The metrics of the evaluation that runs are known."""
    running = job.evaluation.running
    assert running is not None
    finite = {name: value for name, value in report.sums.items() if math.isfinite(value)}
    metrics = dict(list(finite.items())[:MOST_METRICS])
    done = Evaluation(
        number=running.number,
        step=running.ref.step,
        timeline=job.state.timeline,
        checkpoint=running.ref.uuid,
        metrics=metrics,
    )
    shown = ", ".join(f"{name} {value:.6g}" for name, value in list(metrics.items())[:SHOWN])
    message = f"evaluation {done.number} (step {done.step}): {shown or 'no finite metric'}"
    return _settled(job, done, Event("evaluated", message, {"number": done.number, "step": done.step}))


def leave_out(job: Job, number: int, cause: str) -> Decision[None]:
    """There will be no result of that evaluation: training goes on without."""
    status = job.evaluation
    if number <= status.settled:
        return Decision(None)
    running = status.running if status.running is not None and status.running.number == number else None
    message = f"evaluation {number} is left out: {cause}"
    done = Evaluation(
        number=number,
        step=running.ref.step if running is not None else 0,
        timeline=job.state.timeline,
        checkpoint=running.ref.uuid if running is not None else "",
        left_out=cause,
    )
    return _settled(job, done, Event("evaluation_left_out", message, {"number": number, "cause": cause}))


def gives_up(kind: TaskKind, failure: UserFailure | None) -> bool:
    """Whether a discarded task of that kind ends its evaluation and not the job: the files could not be read."""
    unread = {CheckpointUnusable.code, StorageUnreachable.code}
    return kind in BESIDE and failure is not None and failure.error_type in unread


def rewind(job: Job, step: int) -> tuple[Change, ...]:
    """The job goes back to the version `step` in its present timeline: later evaluations are forgotten, and come again."""
    if job.spec.evaluate_every is None:
        return ()
    left = [job.evaluations[number] for number in sorted(job.evaluations) if job.evaluations[number].step <= step]
    last = left[-1] if left else None
    status = EvaluationStatus(
        timeline=job.state.timeline,
        settled=last.number if last is not None else 0,
        recent=tuple(left[-RECENT:]),
        best=last.best if last is not None else None,
    )
    return *_emptied(job), DropEvaluationsAfter(status.settled), status


def started_over(spec: JobSpec, state: JobState) -> tuple[Change, ...]:
    """The job begins anew: nothing is evaluated yet."""
    if spec.evaluate_every is None:
        return ()
    status = EvaluationStatus(timeline=state.timeline)
    return *map(RestartQueue, BESIDE), ValidationSums(), DropEvaluationsAfter(0), status


# -------------------------------------------------------------------- parts


def _settled(job: Job, done: Evaluation, event: Event) -> Decision[None]:
    status = job.evaluation
    best = better(status.best, done, job.spec.keep_best)
    if best is not None and best.number == done.number:
        event = replace(event, message=f"{event.message} (the best so far)", fields={**event.fields, "best": True})
    done = done.model_copy(update={"best": best})
    recent = (*status.recent, done)[-RECENT:]
    after = EvaluationStatus(timeline=status.timeline, settled=done.number, recent=recent, best=done.best)
    surplus = sorted(job.evaluations)[: max(0, len(job.evaluations) + 1 - KEPT)]
    changes: tuple[Change, ...] = (*map(RestartQueue, BESIDE), ValidationSums(), done, after)
    return Decision(None, (*changes, *map(DropEvaluation, surplus)), (event,))


def _emptied(job: Job) -> tuple[Change, ...]:
    """The queues, if anything of them is stored."""
    used = [queue for queue in job.beside if queue.dispatched or queue.pending or queue.requeued or queue.discarded]
    sums: tuple[Change, ...] = (ValidationSums(),) if job.validation != ValidationSums() else ()
    return *(RestartQueue(queue.kind) for queue in used), *sums
