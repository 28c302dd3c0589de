"""Evaluations while a job trains: when one begins, what it gave, what a rollback undoes.

checkpoint of its version committed ─ begin ─► VALIDATE tasks ─► METRICS task ─ settle ─► Evaluation;
    trainers may go on behind the next such version
checkpoint lost, or damaged ─ leave_out ─► the same, without a result
rollback ─ rewind ─► forgotten

Asynchronous: minibatches trained, and the evaluation before it is over ─ due ─► each cut until one is
committed is marked with its number.
Training waits for none. It ends early once all tasks that were given are done. What has not begun when
training is over is left out: the evaluation after training follows at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from master_service.core.changes import (
    Change,
    Decision,
    DropEvaluation,
    DropEvaluationsAfter,
    Event,
    Fields,
    NextEpoch,
    RestartQueue,
)
from master_service.core.decisions import lifecycle
from master_service.core.queue.task_queue import WAIT_S
from master_service.core.state.job import BESIDE, Job
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict, StorageUnreachable
from trireme_shared.protocol.evaluations import (
    MOST_METRICS,
    WHAT_TO_DO,
    Evaluation,
    EvaluationStatus,
    RunningEvaluation,
    better,
    criteria,
    evaluated_point,
    patience_after,
    why_unreported,
)
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailureCause,
    JobSpec,
    JobState,
    Mode,
    Phase,
    Stage,
    TaskAnswer,
    TaskKind,
    UserFailure,
    ValidationSums,
)
from trireme_shared.protocol.records.checkpoints import CheckpointRef, history
from trireme_shared.protocol.records.job import Saving
from trireme_shared.protocol.records.step import LanePosition

KEPT = 1000
RECENT = 2
SHOWN = 4


def begin(job: Job) -> Decision[bool]:
    """The next evaluation whose checkpoint is there. Answers whether one has begun."""
    state, status = job.state, job.evaluation
    over = state.stage is not Stage.TRAIN and (
        job.spec.mode is Mode.ASYNC or state.stage is not Stage.EVALUATE
    )
    stands = state.phase is not Phase.RUNNING or over
    if (
        stands
        or job.spec.evaluate_every is None
        or status.running is not None
        or status.timeline != state.timeline
    ):
        return Decision(False)
    ref = next_due(job)
    if ref is None:
        return Decision(False)
    running = status.with_fields(
        settled=ref.evaluation - 1, running=RunningEvaluation(number=ref.evaluation, ref=ref)
    )
    fields: Fields = {"number": ref.evaluation, "step": ref.evaluated_step}
    place = evaluated_point(job.spec.mode, ref.evaluated_step)
    told = [Event("evaluation_begun", f"evaluation {ref.evaluation} begins: {place}", fields)]
    if (missing := ref.evaluation - 1 - status.settled) > 0:
        message = (
            f"{missing} evaluations before number {ref.evaluation} are left out: their checkpoints "
            "were not written"
        )
        told.insert(0, Event("evaluation_left_out", message, {"number": ref.evaluation - 1}))
    return Decision(True, (*_emptied(job), running), tuple(told))


def next_due(job: Job) -> CheckpointRef | None:
    """The checkpoint of the first evaluation that is not settled, if it is committed."""
    due = [ref for ref in of_history(job) if ref.evaluation > job.evaluation.settled]
    due = [ref for ref in due if ref.uuid not in job.state.damaged]
    due = [
        ref for ref in due if not job.evaluation.stops_before(ref.evaluation)
    ]  # that one is evaluated after training
    return min(due, key=lambda ref: (ref.evaluation, -ref.step), default=None)


def of_history(job: Job) -> tuple[CheckpointRef, ...]:
    """The kept checkpoints of the job's history, newest first."""
    latest, state = job.members.latest, job.state
    return history(latest.kept, state.timeline, state.checkpoint) if latest is not None else ()


def due(job: Job) -> int:
    """Asynchronous: number of the evaluation that is due at the next cut; 0: none."""
    spec, status, state = job.spec, job.evaluation, job.state
    unknown = status.timeline != state.timeline or status.stop_after is not None
    if (
        spec.evaluate_every is None
        or spec.mode is not Mode.ASYNC
        or state.stage is not Stage.TRAIN
        or unknown
    ):
        return 0
    every = job.epoch_minibatches if spec.evaluate_every == "epoch" else int(spec.evaluate_every)
    last = status.recent[-1].step if status.recent else 0
    waits = status.running is not None or job.minibatches_done // every <= last // every
    return 0 if waits else status.settled + 1


def marked(job: Job, saving: Saving) -> Saving:
    """`saving` with what the checkpoint of a cut made now says of evaluations. Every cut is marked until one
    is committed, since any of them may be lost."""
    number = due(job)
    return saving.with_fields(evaluation=number, minibatches=job.minibatches_done) if number else saving


def acquire(job: Job, ask: AcquireTask) -> Decision[TaskAnswer]:
    """A task of the evaluation that runs; "wait" while it is under way, or `ask.epoch` is not settled; else
    "end"."""
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
    if why := _nobody_reports(job, report.metrics):
        return lifecycle.fail(job.state, f"{why}; {WHAT_TO_DO}", FailureCause.SCRIPT)
    finite = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
    for name in criteria(job.spec).values():
        if name in finite:
            finite = {name: finite[name]} | finite  # these are kept, however many there are
    metrics = dict(list(finite.items())[:MOST_METRICS])
    done = Evaluation(
        number=running.number,
        step=running.ref.evaluated_step,
        timeline=job.state.timeline,
        checkpoint=running.ref.uuid,
        metrics=metrics,
        saved=_saved(running.ref),
    )
    shown = ", ".join(f"{name} {value:.6g}" for name, value in list(metrics.items())[:SHOWN])
    place = evaluated_point(job.spec.mode, done.step)
    message = f"evaluation {done.number} ({place}): {shown or 'no finite metric'}{_not_kept(report, metrics)}"
    return _settled(job, done, Event("evaluated", message, {"number": done.number, "step": done.step}))


def _not_kept(report: CompleteTask, kept: Mapping[str, float]) -> str:
    """What becomes of the other metrics, as the end of a sentence."""
    nowhere = [name for name, value in report.metrics.items() if not math.isfinite(value)]
    more = len(report.metrics) - len(nowhere) - len(kept)
    told = f"; not finite: {', '.join(nowhere[:SHOWN])}" if nowhere else ""
    told += f" and {len(nowhere) - SHOWN} more" if len(nowhere) > SHOWN else ""
    return told + (
        f"; {more} more metrics are left out, of {MOST_METRICS} at most that are kept of an evaluation: let "
        "metrics(sums) in the script say which"
        if more
        else ""
    )


def leave_out(job: Job, number: int, cause: str) -> Decision[None]:
    """There will be no result of that evaluation: training goes on without."""
    status = job.evaluation
    if number <= status.settled:
        return Decision(None)
    running = status.running if status.running is not None and status.running.number == number else None
    message = f"evaluation {number} is left out: {cause}"
    done = Evaluation(
        number=number,
        step=running.ref.evaluated_step if running is not None else 0,
        timeline=job.state.timeline,
        checkpoint=running.ref.uuid if running is not None else "",
        left_out=cause,
        saved=_saved(running.ref) if running is not None else 0,
    )
    return _settled(job, done, Event("evaluation_left_out", message, {"number": number, "cause": cause}))


def stop(job: Job, ask: AcquireTask) -> Decision[None]:
    """Training ends at the version whose positions are in `ask`, as stop_early says: all trainers do nothing
    else there. Raises Conflict."""
    if job.evaluation.stop_after is None:
        raise Conflict(f"{ask.trainer} says that training ends early, but no evaluation has said so")
    epochs = ask.stopped[0].epoch + all(position.exhausted for position in ask.stopped)
    ended = _stopped(job, ask.index, epochs, trained_records(job, ask.stopped))
    return Decision(None, (NextEpoch(job.spec.epochs), *ended.changes), ended.events)


def stopping(job: Job, ending: str = "") -> Decision[None] | None:
    """Asynchronous: None while tasks of training may be given. Else training ends as stop_early says, as soon
    as those are done that were given: also those whose trainer has died, so each minibatch of a task that has
    begun counts. `ending`: the task that ends now."""
    queue, state = job.training, job.state
    if job.evaluation.stop_after is None or job.spec.mode is not Mode.ASYNC or state.stage is not Stage.TRAIN:
        return None
    if queue.requeued:
        return None
    if queue.pending.keys() - {ending} or state.absent:
        return Decision(None)
    given, epoch = queue.cursors.get(queue.streams.name(0), 0), queue.current
    records = epoch * queue.streams.records + queue.streams.sum(epoch, 0, given, lambda records: records)
    for (lost_in, task_id), lost in queue.discarded.items():
        records -= lost.records if lost_in < epoch or queue.streams.place(lost_in, task_id)[1] < given else 0
    minibatches = job.minibatches_done
    if held := queue.pending.get(ending):
        size = job.spec.minibatch_size
        minibatches += -(-queue.streams.records_of(ending) // size) - held.minibatches
    return _stopped(job, minibatches, queue.epoch, records)


def trained_records(job: Job, positions: Sequence[LanePosition]) -> int:
    """In all epochs up to these positions, without those of discarded tasks."""
    queue, epoch = job.training, positions[0].epoch
    streams, table = queue.streams, queue.streams.table
    done = {each.lane: streams.length(each.lane) if each.exhausted else each.index for each in positions}
    full = table.task_records if table is not None else 0
    total = epoch * streams.records + sum(
        done[each.lane] * full + (0 if each.exhausted else each.offset) for each in positions
    )
    for number, records in table.short_tasks if table is not None else ():
        lane, index = streams.place(epoch, streams.task_id(number))
        total -= full - records if index < done.get(lane, 0) else 0
    for (lost_in, task_id), lost in queue.discarded.items():
        lane, index = streams.place(lost_in, task_id)
        total -= lost.records if lost_in < epoch or (lost_in == epoch and index < done.get(lane, 0)) else 0
    return total


def gives_up(kind: TaskKind, failure: UserFailure | None) -> bool:
    """Whether a discarded task of that kind ends its evaluation and not the job: the files could not be
    read."""
    unread = {CheckpointUnusable.code, StorageUnreachable.code}
    return kind in BESIDE and failure is not None and failure.error_type in unread


def rewind(job: Job, step: int) -> tuple[Change, ...]:
    """The job goes back to the version `step` (asynchronous: to its checkpoint of that number) in its present
    timeline: later evaluations are not in force any more, and come again. One that has begun begins anew:
    once training is over, it would not come again."""
    if job.spec.evaluate_every is None:
        return ()
    done = [job.evaluations[number] for number in sorted(job.evaluations)]
    left = [each for each in done if (each.saved or each.step) <= step]
    while left and left[-1].left_out and not left[-1].step:
        left.pop()  # its version is not known: it may be a later one
    if left and (best := left[-1].best) is not None and not _is_kept(job, best.checkpoint):
        # that one is made again, with its checkpoint
        left = [each for each in left if each.number < best.number]
    last, running = left[-1] if left else None, job.evaluation.running
    goes_on = running is not None and job.spec.mode is Mode.ASYNC and running.ref.step <= step
    status = EvaluationStatus(
        timeline=job.state.timeline,
        settled=last.number if last is not None else 0,
        running=running if goes_on else None,
        recent=tuple(left[-RECENT:]),
        best=last.best if last is not None else None,
        stop_after=_stop_after(last),
        redone=job.evaluation.redone,
    )
    if job.spec.mode is Mode.ASYNC:
        return *_emptied(job), DropEvaluationsAfter(status.settled), status
    # later results of a synchronous job stay: it may be restored to a later checkpoint, and then those before
    # it are over
    unknown = [DropEvaluation(each.number) for each in done if each.number > status.settled and each.left_out]
    return *_emptied(job), *unknown, status


def in_force(job: Job) -> list[Evaluation]:
    """Those that are over in the job's present timeline, in their order: later ones are of steps that it left
    in a restore."""
    return [job.evaluations[number] for number in sorted(job.evaluations) if number <= job.evaluation.settled]


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
        event = replace(
            event, message=f"{event.message} (the best so far)", fields={**event.fields, "best": True}
        )
    before = status.recent[-1].patience if status.recent else None
    patience = before if done.left_out else patience_after(before, done.metrics, job.spec.stop_early)
    done = done.with_fields(best=best, patience=patience)
    told = [event]
    if patience is not None and patience.over and job.spec.stop_early is not None:
        stop = job.spec.stop_early
        end = (
            "after the tasks under way"
            if job.spec.mode is Mode.ASYNC
            else "at the next step that is evaluated"
        )
        message = f"training ends {end}: {stop.metric} was not better in {patience.worse} evaluations"
        told.append(Event("stopping_early", message, {"number": done.number, "step": done.step}))
    recent = (*status.recent, done)[-RECENT:]
    after = EvaluationStatus(
        timeline=status.timeline,
        settled=done.number,
        recent=recent,
        best=done.best,
        stop_after=_stop_after(done),
        redone=status.redone,
    )
    surplus = sorted(job.evaluations)[: max(0, len(job.evaluations) + 1 - KEPT)]
    changes: tuple[Change, ...] = (*map(RestartQueue, BESIDE), ValidationSums(), done, after)
    return Decision(None, (*changes, *map(DropEvaluation, surplus)), tuple(told))


def _nobody_reports(job: Job, metrics: Mapping[str, float]) -> str:
    """Which setting names a metric that neither this evaluation nor one before has; "": none does."""
    before = {name for each in in_force(job) for name in each.metrics}
    return (
        why_unreported(job.spec, metrics)
        if why_unreported(job.spec, {**metrics, **dict.fromkeys(before)})
        else ""
    )


def _is_kept(job: Job, uuid: str) -> bool:
    """Whether that checkpoint may be loaded. A job without any cannot tell."""
    latest = job.members.latest
    return latest is None or any(ref.uuid == uuid for ref in latest.kept)


def _saved(ref: CheckpointRef) -> int:
    return ref.step if ref.minibatches else 0


def _stopped(job: Job, step: int, epochs: int, records: int) -> Decision[None]:
    """Training is over, as stop_early says. `epochs`: so many are done."""
    ended = lifecycle.advance_stage(job, (), last=True)
    place = evaluated_point(job.spec.mode, step)
    told = Event("stopped_early", f"training ends at {place}, as stop_early says", {"step": step})
    result = job.state.result.with_fields(trained_records=records, stopped_step=step, stopped_epochs=epochs)
    states = tuple(
        change.with_fields(result=result) if isinstance(change, JobState) else change
        for change in ended.changes
    )
    return Decision(None, states, (told, *ended.events))


def _stop_after(last: Evaluation | None) -> int | None:
    return last.number if last is not None and last.patience is not None and last.patience.over else None


def _emptied(job: Job) -> tuple[Change, ...]:
    """The queues, if anything of them is stored."""
    used = [
        queue
        for queue in job.beside
        if queue.dispatched or queue.pending or queue.requeued or queue.discarded
    ]
    sums: tuple[Change, ...] = (ValidationSums(),) if job.validation != ValidationSums() else ()
    return *(RestartQueue(queue.kind) for queue in used), *sums
