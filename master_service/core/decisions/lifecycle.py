"""The job as a whole: phases, stages, its end, and how many errors of the user's code it survives.

WAITING --parameters initialised, a trainer there--> RUNNING: TRAIN -> EVALUATE -> EXPORT -> COMPLETED (DONE)
   |                                                    |
   +-------- too many user errors, pserver lost, too much discarded --------> FAILED
                                                                                |
   WAITING <--started again, if its script is not the cause: to the newest checkpoint
   WAITING <--trained longer, with more epochs: COMPLETED, or behind TRAIN
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from master_service.core.changes import Change, Decision, Event, Fields, NextEpoch, PutDiscarded, RestartQueue
from master_service.core.state import phases
from master_service.core.state.job import FailureBudget, Job
from trireme_shared.protocol.errors import (
    Conflict,
    DatasetError,
    LayoutMismatch,
    ResourceExhausted,
    StorageUnreachable,
)
from trireme_shared.protocol.records import (
    CompleteTask,
    EvaluationSums,
    FailureCause,
    JobResult,
    JobSpec,
    JobState,
    Mode,
    Phase,
    Stage,
    TaskKind,
    UserFailure,
)
from trireme_shared.protocol.records.queue import error_digest
from trireme_shared.protocol.records.record import MESSAGE_CHARACTERS, shortened
from trireme_shared.protocol.records.tasks import BestEvaluation

REMEMBERED_ERRORS = 64

A = TypeVar("A")


def next_stage(spec: JobSpec, stage: Stage) -> Stage:
    match stage:
        case Stage.TRAIN:
            return Stage.EVALUATE if spec.evaluation_dataset else Stage.EXPORT
        case Stage.EVALUATE:
            return Stage.EXPORT
        case Stage.EXPORT | Stage.DONE:
            return Stage.DONE


def cause_of(failure: UserFailure | None) -> FailureCause:
    """None: no code raised, a trainer was silent."""
    if failure is None:
        return FailureCause.MEMBERS
    causes = {
        DatasetError.code: FailureCause.DATASET,
        ResourceExhausted.code: FailureCause.MEMBERS,
        StorageUnreachable.code: FailureCause.STORAGE,
    }
    return causes.get(failure.error_type, FailureCause.SCRIPT)


def start_again(state: JobState) -> Decision[bool]:
    """The user starts a job that has failed again: it may go on, unless its script is the cause. It has no
    members now, so it goes back to its newest checkpoint as soon as they are there."""
    if state.phase is not Phase.FAILED or state.cause in (None, FailureCause.SCRIPT):
        return Decision(False)
    again = phases.started_again(state)
    match state.stage:
        case Stage.EVALUATE:
            queues: tuple[Change, ...] = (RestartQueue(TaskKind.EVALUATE), EvaluationSums())
        case Stage.EXPORT:
            queues = (RestartQueue(TaskKind.EXPORT),)
        case Stage.TRAIN | Stage.DONE:
            queues = ()
    return Decision(True, (again, *queues), (Event("started_again", again.reason, {}),))


def train_longer(state: JobState, epochs: int) -> Decision[None]:
    """The user gives the job `epochs` epochs, more than it had. If training was over it goes on from the
    newest checkpoint, as soon as members are there; what followed training comes again. Raises Conflict if
    the job was stopped early."""
    if state.stage is Stage.TRAIN:
        return Decision(None)
    if state.result.stopped_step is not None:
        raise stopped_early(state.result.stopped_step)
    longer = phases.trained_longer(state, f"it trains longer, to epoch {epochs}")
    queues = (RestartQueue(TaskKind.EVALUATE), RestartQueue(TaskKind.EXPORT), EvaluationSums())
    return Decision(None, (longer, *queues))


def stopped_early(step: int) -> Conflict:
    """More epochs change nothing for a job that stop_early has ended."""
    return Conflict(
        f"stop_early ended the job at step {step}, so more epochs would not change it",
        hint="train a new job that starts with its parameters: --init-from JOB --job NAME",
    )


def fail(
    state: JobState, reason: str, cause: FailureCause, failure: UserFailure | None = None
) -> Decision[None]:
    """The job has failed. A job that has ended already stays as it is."""
    if state.phase.final:
        return Decision(None)
    reason = shortened(reason, MESSAGE_CHARACTERS)
    failed = phases.failed(state, reason, cause, failure)
    fields: Fields = {"reason": reason, "cause": str(cause)}
    if failure:
        fields |= {"error_type": failure.error_type, "task": failure.task, "trainer": failure.trainer}
    return Decision(None, (failed,), (Event("job_failed", reason, fields),))


def with_counts(job: Job, decision: Decision[A]) -> Decision[A]:
    """`decision`, in which the result of a job that fails says what was trained and what was left out until
    then."""
    if job.state.phase.final or not any(
        isinstance(c, JobState) and c.phase is Phase.FAILED for c in decision.changes
    ):
        return decision
    discarded = [each.records for each in job.training.discarded.values()]
    discarded += [c.records for c in decision.changes if isinstance(c, PutDiscarded) and c.task_id.isdigit()]

    def counted(change: Change) -> Change:
        if not (isinstance(change, JobState) and change.phase is Phase.FAILED):
            return change
        result = change.result.with_fields(
            discarded_tasks=len(discarded),
            discarded_records=sum(discarded),
            trained_records=max(0, job.records_done - sum(discarded)),
            losses=job.losses,
        )
        return change.with_fields(result=result)

    return replace(decision, changes=tuple(map(counted, decision.changes)))


def count_failure(
    budget: FailureBudget, state: JobState, failure: UserFailure, *, in_task: bool
) -> Decision[None]:
    """The counts after one more failure, and the end of the job if it was one too many.

    Before a step is known to be done, the same error twice ends the job: it would fail every time. After that
    a failure inside a task does not count here: the task is discarded when its own failures are spent. One
    outside tasks always counts. A fatal one ends the job at once.
    """
    if failure.fatal:
        where = f" in {failure.task}" if failure.task else ""
        return fail(state, f"{failure.error_type}{where}: {failure.message}", cause_of(failure), failure)
    if state.phase.final or (in_task and budget.started):
        return Decision(None)
    before = budget.counts
    error, total = error_digest(failure.error_type, failure.message), before.total + 1
    times = before.seen.get(error, 0) + 1
    kept = error in before.seen or len(before.seen) < REMEMBERED_ERRORS
    seen = {**before.seen, error: times} if kept else before.seen
    counts = before.with_fields(total=total, seen=seen)
    counted: Decision[None] = Decision(None, (counts,))
    what = f"{failure.error_type}: {failure.message}"
    if not budget.started and times >= 2:
        reason = f"{failure.error_type} twice before a step was known to be done: {failure.message}"
    elif total >= budget.allowed:
        reason = f"{total} failures of the user's code (max_user_failures {budget.allowed}), the last: {what}"
    else:
        return counted
    return counted + fail(state, reason, cause_of(failure), failure)


def count_outside_tasks(job: Job, failure: UserFailure) -> Decision[None]:
    """As `count_failure`, of a trainer that does not train. While others train, a model that is not the job's
    concerns its own trainer alone: it is refused, and nothing is counted."""
    others = (job.members.trainers.keys() & set(job.trainers.names)) - {failure.trainer}
    if failure.error_type == LayoutMismatch.code and others:
        return Decision(None)
    return count_failure(job.known_budget, job.state, failure, in_task=False)


def advance_stage(
    job: Job, changes: tuple[Change, ...], *, last: bool = False, report: CompleteTask | None = None
) -> Decision[None]:
    """What follows from the end of a task or an epoch: an event, the next stage, or the end of the job."""
    state, spec = job.state, job.spec
    decision: Decision[None] = Decision(None)
    for change in changes:
        if isinstance(change, NextEpoch):
            message = f"epoch {change.epoch - 1} is done ({change.epoch} of {spec.epochs})"
            decision += Decision(None, (), (Event("epoch_done", message, {"epoch": change.epoch - 1}),))
            last = change.epoch >= spec.epochs
    if not last or state.phase.final:
        return decision
    stage = next_stage(spec, state.stage)
    if stage is Stage.DONE:
        ended = phases.completed(state, _result(job, report))
        exports = len(report.exports) if report else 0
        event = Event("job_completed", f"job {spec.job} is completed", {"exports": exports})
    else:
        ended = state.with_fields(stage=stage, reason=f"{state.stage} is done")
        event = Event("stage_changed", f"{state.stage} is done, {stage} begins", {"stage": str(stage)})
    return decision + Decision(None, (ended,), (event,))


def _result(job: Job, report: CompleteTask | None) -> JobResult:
    """Of a completed job. `report`: the export's; its sums are the user's `metrics(sums)`, else the sums are
    the metrics."""
    discarded = list(job.training.discarded.values())
    lost = sum(change.records for change in discarded)
    stopped = job.evaluation.stop_after is not None and job.state.result.stopped_step is not None
    stopped &= (
        job.spec.mode is Mode.SYNC or job.training.epoch < job.spec.epochs
    )  # not after a rollback, trained to the end
    return job.state.result.with_fields(
        metrics=(report.metrics if report else {}) or job.sums.numbers,
        exports=report.exports if report else {},
        best=_best(job, report),
        discarded_tasks=len(discarded),
        discarded_records=lost,
        losses=job.losses,
        trained_records=job.state.result.trained_records
        if stopped
        else job.spec.epochs * job.training.streams.records - lost,
        stopped_step=job.state.result.stopped_step if stopped else None,
        stopped_epochs=job.state.result.stopped_epochs if stopped else None,
    )


def _best(job: Job, report: CompleteTask | None) -> BestEvaluation | None:
    """Trainers of an asynchronous job do not know how many minibatches there were before the evaluation after
    training."""
    best = report.best if report else None
    if best is None or best.checkpoint or job.spec.mode is Mode.SYNC:
        return best
    return best.with_fields(step=job.minibatches_done)
