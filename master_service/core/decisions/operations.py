"""Requests that take long: create a checkpoint, verify one, restore the job to one.

CREATE    asked -> job/checkpoint written -> lane 0 carries it into a version -> that one is `latest` -> DONE
          asynchronous: asked -> the next pause (pause_checkpoint.py)
              -> its checkpoint, or a later one, is `latest` -> DONE
          while one is being made: asked -> that one has ended -> as above, for all that asked meanwhile
RESTORE   asked -> every part read -> ROLLING_BACK(timeline) -> RUNNING in that timeline -> DONE
VERIFY    asked -> every part read -> DONE | FAILED
RESIZE    see resize.py

Decisions only; the files are read by control/operation_runner.py.
"""

from __future__ import annotations

from master_service.core.changes import Change, Decision, DropOperation, Event
from master_service.core.decisions import recovery, resize
from master_service.core.state.job import KEPT_OPERATIONS, Job, Members, end_operation, operation_fields
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict, DeadlineExceeded, NotFound
from trireme_shared.protocol.records import Mode, Phase, Stage, Strategy
from trireme_shared.protocol.records.checkpoints import CheckpointRef, history, saved_point
from trireme_shared.protocol.records.operations import (
    Operation,
    OperationKind,
    OperationState,
    saves_on_demand,
)

# after 30, 90, 210, ... seconds: lane 0 may have changed its owner, and the request was missed
ASK_AGAIN_S = 30.0
DRAIN_LIMIT_S = 60.0
MAX_RUNNING = 16  # of a kind; the files of verifications are read one after the other
AT_ONCE = 40  # operations in one transaction
READS_FILES = (OperationKind.RESTORE_CHECKPOINT, OperationKind.VERIFY_CHECKPOINT)


# -------------------------------------------------------------------- asking


def ask(job: Job, asked: Operation, *, keyed: bool = False) -> Decision[Operation]:
    """Answers the operation: the one that the same key began before. (CREATE) If one waits whose checkpoint
    is not begun, that one answers, or with a key of its own (`keyed`) one that shares its checkpoint, so that
    the same key finds it again. One whose step may be chosen already is older than the request: another one
    waits for its end. Raises NotFound, Conflict."""
    if (known := _known(job, asked)) is not None:
        return Decision(known)
    if asked.kind in READS_FILES:
        asked = asked.with_fields(step=find_checkpoint(job, asked.checkpoint_id).step)
    waiting = len(job.operations.running(asked.kind))
    match asked.kind:
        case OperationKind.CREATE_CHECKPOINT:
            _check_possible(job, "a checkpoint")
            return _ask_for_checkpoint(job, asked, keyed=keyed)
        case OperationKind.RESTORE_CHECKPOINT:
            _check_possible(job, "going back to a checkpoint")
            for running in job.operations.running(asked.kind):
                place = saved_point(job.spec.mode, running.step or 0)
                msg = f"the job is about to go back to {place} already ({running.operation_id})"
                raise Conflict(msg, hint="wait for its end", operation=running.operation_id)
            what = f"back to {saved_point(job.spec.mode, asked.step or 0)}, once its files are found good"
            return _begin(job, asked, _asked_event(asked, "restore_asked", what))
        case OperationKind.VERIFY_CHECKPOINT:
            if waiting >= MAX_RUNNING:
                msg = f"{waiting} verifications run or wait already, at most {MAX_RUNNING} are taken"
                raise Conflict(msg, hint="wait until one of them has ended")
            return _begin(
                job,
                asked,
                _asked_event(asked, "verify_asked", f"verify {saved_point(job.spec.mode, asked.step or 0)}"),
            )
        case OperationKind.RESIZE:
            asked = resize.checked(job, asked)
            return _begin(job, asked, _asked_event(asked, "resize_asked", resize.sentence(asked)))
        case OperationKind.PAUSE | OperationKind.RESUME | OperationKind.CANCEL | OperationKind.DELETE:
            raise AssertionError(f"{asked.kind} is its cluster's to keep (job_operations.py)")


def ask_for_draining(job: Job, stamp: str) -> Decision[None]:
    """A parameter server that was asked to leave needs its parameters in a checkpoint first."""
    latest, state = job.members.latest, job.state
    trains = state.stage is Stage.TRAIN and state.phase in {Phase.RUNNING, Phase.CHECKPOINTING}
    if not trains or not saves_on_demand(job.spec) or job.operations.running(OperationKind.CREATE_CHECKPOINT):
        return Decision(None)  # the checkpoint that is being made may be enough
    for index, member in job.members.pservers.items():
        saved = latest is not None and latest.covers(state.timeline, member.draining or 0)
        operation_id = f"drain-{member.incarnation}"
        if member.draining is None or saved or operation_id in job.operations.records:
            continue
        asked = Operation(
            operation_id=operation_id,
            kind=OperationKind.CREATE_CHECKPOINT,
            cause=f"pserver-{index} is about to leave",
            limit_s=DRAIN_LIMIT_S,
            create_time=stamp,
        )
        return Decision(None) + ask(job, asked)
    return Decision(None)


def find_checkpoint(job: Job, checkpoint_id: str) -> CheckpointRef:
    """Raises NotFound, which lists the existing ids."""
    ref = recovery.ref_of(job.members.latest, checkpoint_id)
    if ref is None:
        there = [f"{ref.uuid} ({saved_point(job.spec.mode, ref.step)})" for ref in _kept(job.members)]
        msg = (
            f"job {job.spec.job} has no checkpoint {checkpoint_id}; there are: "
            f"{', '.join(there) or 'none yet'}"
        )
        raise NotFound(msg, checkpoints=[ref.uuid for ref in _kept(job.members)])
    return ref


# -------------------------------------------------------------------- progress


def not_begun(job: Job) -> list[Operation]:
    """Asynchronous: checkpoints that were asked for and have no pause yet."""
    if job.spec.mode is Mode.SYNC:
        return []
    return [operation for operation in job.operations.making() if operation.step is None]


def mark_begun(job: Job, step: int) -> Decision[None]:
    """A pause for checkpoint number `step` begins, in the same transaction."""
    changes = [asked.with_fields(step=step) for asked in not_begun(job)]
    return Decision(None, tuple(changes))


def advance(job: Job, stamp: str) -> Decision[None]:
    """What the members, the newest checkpoint and the job's state mean for running operations, AT_ONCE
    changes at most."""
    decision: Decision[None] = Decision(None)
    for operation in job.operations.running():
        if len(decision.changes) >= AT_ONCE:
            break
        match operation.kind:
            case OperationKind.CREATE_CHECKPOINT:
                decision += _advance_creation(job, operation, stamp)
            case OperationKind.RESTORE_CHECKPOINT:
                decision += _advance_restoration(job, operation, stamp)
            case OperationKind.VERIFY_CHECKPOINT:
                pass
            case OperationKind.RESIZE:
                decision += _advance_resize(job, operation, stamp)
    return decision


def tick(job: Job, now: float, stamp: str) -> Decision[None]:
    """Operations past their limit fail; requests without an effect are repeated. AT_ONCE changes at most."""
    decision: Decision[None] = Decision(None)
    making = job.operations.making()
    for operation in job.operations.running():
        if len(decision.changes) >= AT_ONCE:
            break
        spent_s = now - job.operations.since[operation.operation_id]
        requested_s = now - job.operations.requested.get(operation.operation_id, now)
        if spent_s > operation.limit_s:
            reason = f"not done within {operation.limit_s:g} s: it waited for {waits_for(job, operation)}"
            if operation.kind is OperationKind.RESIZE:
                decision += resize.give_up(job, operation, reason, stamp)
                continue
            decision += end_operation(
                operation, OperationState.FAILED, reason, stamp, code=DeadlineExceeded.code
            )
        elif operation in making and requested_s > ASK_AGAIN_S * (2**operation.attempt - 1):
            again = operation.with_fields(attempt=operation.attempt + 1, step=None)
            message = f"still no checkpoint {requested_s:.0f} s after it was asked for: asked again"
            decision += Decision(
                None, (again,), (Event("checkpoint_asked", message, operation_fields(again)),)
            )
    return decision


def begin_next(job: Job) -> Decision[None]:
    """No checkpoint is being made any more: the oldest request that waits has the next one made, for itself
    and for all others that are left. One whose maker failed is left, too: another one's limit is not its
    own."""
    records = job.operations.records
    left = [
        operation
        for operation in job.operations.running(OperationKind.CREATE_CHECKPOINT)
        if (maker := records.get(operation.joined or operation.after)) is None
        or (not maker.running and not (operation.joined and maker.state is OperationState.DONE))
    ]
    if not left or job.operations.making():
        return Decision(None)
    first = left[0].with_fields(after="", joined="")
    others = [other.with_fields(after="", joined=first.operation_id) for other in left[1:]]
    return Decision(None, (first, *others), (_checkpoint_asked(first),))


def verified(job: Job, operation_id: str, error: CheckpointUnusable | None, stamp: str) -> Decision[None]:
    """All parts were read. A restoration begins only if they are good."""
    operation = job.operations.records.get(operation_id)
    if operation is None or not operation.running or operation.timeline:
        return Decision(None)
    if error is not None:
        return end_operation(operation, OperationState.FAILED, error.message, stamp, code=error.code)
    if operation.kind is OperationKind.VERIFY_CHECKPOINT:
        return end_operation(operation, OperationState.DONE, "every part is as it was written", stamp)
    if job.state.phase is Phase.CHECKPOINTING:
        return Decision(None)  # decided again after the pause
    ref = recovery.ref_of(job.members.latest, operation.checkpoint_id)
    if ref is None or job.state.phase.final:
        return _advance_restoration(job, operation, stamp) if ref else _deleted(operation, stamp)
    back = recovery.back_to(job.spec, job.state, job.slots, ref, operation.cause)
    begun = operation.with_fields(timeline=job.state.generation + 1)
    return Decision(None, (begun,)) + back


def waits_for(job: Job, operation: Operation) -> str:
    """For people."""
    state, collective = job.state, job.spec.strategy is Strategy.COLLECTIVE
    if operation.kind is OperationKind.RESIZE:
        return resize.waits_for(job, operation)
    if operation.after:
        return f"{operation.after} to end: its own checkpoint is the next one"
    if (maker := job.operations.records.get(operation.joined)) is not None and maker.running:
        return waits_for(job, maker)
    if operation.kind is not OperationKind.CREATE_CHECKPOINT and not operation.timeline:
        return "the checkpoint's files to be read and compared"
    if operation.kind is OperationKind.RESTORE_CHECKPOINT:
        return (
            f"the {'trainers' if collective else 'parameter servers'} to load the checkpoint "
            f"({state.phase}: {state.reason})"
        )
    if state.phase is Phase.CHECKPOINTING or operation.step is not None:
        return "all trainers to pause, and every parameter server to write its part"
    if state.phase is not Phase.RUNNING:
        return f"the job to run (it is {state.phase}: {state.reason})"
    if job.spec.mode is not Mode.SYNC:
        return "the next pause"
    if not job.trainers.names:
        return "a trainer: without one no step is made"
    return (
        f"the next step but one, and every {'trainer' if collective else 'parameter server'} to write "
        "its part of it"
    )


# -------------------------------------------------------------------- parts


def _advance_creation(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    latest, state = job.members.latest, job.state
    if operation.joined:
        return _advance_joined(job, operation, stamp)
    if latest is not None:
        is_here = latest.timeline == state.timeline or latest.uuid == state.checkpoint
        paused = is_here and operation.step is not None and latest.step >= operation.step
        if paused or latest.operation == operation.operation_id or (latest.final and is_here):
            place = saved_point(job.spec.mode, latest.step)
            what = "the last step's: nothing is left to train" if latest.final else f"of {place}"
            made = operation.with_fields(checkpoint_id=latest.uuid, step=latest.step)
            return end_operation(made, OperationState.DONE, f"the checkpoint is there, {what}", stamp)
    if state.phase.final:
        reason = f"the job is {state.phase} before the checkpoint was there"
        return end_operation(operation, OperationState.FAILED, reason, stamp, code=Conflict.code)
    return Decision(None)


def _advance_joined(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """It is done once the operation that makes the checkpoint is. If that one fails, another one makes it
    (`begin_next`)."""
    maker = job.operations.records.get(operation.joined)
    if maker is None or maker.state is not OperationState.DONE:
        return Decision(None)
    made = operation.with_fields(checkpoint_id=maker.checkpoint_id, step=maker.step)
    return end_operation(made, maker.state, maker.reason, stamp)


def _advance_restoration(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    state = job.state
    if state.phase.final:
        reason = f"the job is {state.phase}: {state.reason}"
        return end_operation(operation, OperationState.FAILED, reason, stamp, code=Conflict.code)
    if not operation.timeline or state.timeline < operation.timeline:
        return Decision(None)
    if state.checkpoint != operation.checkpoint_id:
        reason = f"the job went back to another checkpoint: {state.reason}"
        return end_operation(operation, OperationState.FAILED, reason, stamp, code=CheckpointUnusable.code)
    if state.phase is Phase.RUNNING:
        return end_operation(
            operation,
            OperationState.DONE,
            f"the job goes on from {saved_point(job.spec.mode, operation.step or 0)}",
            stamp,
        )
    return Decision(None)


def _deleted(operation: Operation, stamp: str) -> Decision[None]:
    reason = f"checkpoint {operation.checkpoint_id} was deleted meanwhile: newer ones took its place"
    return end_operation(operation, OperationState.FAILED, reason, stamp, code=NotFound.code)


def _known(job: Job, asked: Operation) -> Operation | None:
    """The operation that the same key began before. Raises Conflict if it asked for something else."""
    known = job.operations.records.get(asked.operation_id)
    if known is None:
        return None
    if (known.kind, _about(known)) != (asked.kind, _about(asked)):
        msg = (
            f"this Idempotency-Key asked for {known.kind} {_about(known)} before, now for "
            f"{asked.kind} {_about(asked)}: "
            "use a new key for a new request"
        )
        raise Conflict(msg, operation=known.operation_id)
    return known


def _about(operation: Operation) -> str:
    """What an operation of its kind is about: the same key may not ask for something else."""
    wanted = operation.resize
    if wanted is not None:
        return f"{wanted.trainers} trainers, {wanted.pservers} parameter servers, {wanted.strategy}"
    return operation.checkpoint_id if operation.kind in READS_FILES else ""


def _advance_resize(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """RESTART needs a checkpoint first, which is asked for as any other."""
    saving = resize.needs_checkpoint(job, operation, stamp)
    if saving is None:
        return resize.advance(job, operation, stamp)
    asked = ask(job, saving, keyed=True)
    begun = operation.resize.with_fields(saving=asked.answer.operation_id) if operation.resize else None
    return Decision(None, (operation.with_fields(resize=begun),)) + asked


def _check_possible(job: Job, what: str) -> None:
    """Raises Conflict."""
    state = job.state
    if not saves_on_demand(job.spec):
        msg = (
            f"{what} on demand needs coordinated checkpoints; job {job.spec.job} is {job.spec.mode} with "
            f"{job.spec.checkpoint_kind} ones and dispatch {job.spec.dispatch}"
        )
        raise Conflict(msg, hint="each parameter server saves by itself, every checkpoint_every_seconds")
    if state.phase is Phase.COMPLETED:
        latest = job.members.latest
        have = (
            f"; its newest checkpoint is {latest.uuid} ({saved_point(job.spec.mode, latest.step)})"
            if latest
            else ""
        )
        msg = f"job {job.spec.job} is COMPLETED: {what} is not possible any more{have}"
        raise Conflict(
            msg, hint="`trireme export CHECKPOINT` gets a model out of a checkpoint; --fresh trains anew"
        )
    if state.phase is Phase.FAILED:
        msg = f"job {job.spec.job} has FAILED ({state.reason}): {what} is not possible any more"
        raise Conflict(msg, hint="fix the cause and start the job again")


def _ask_for_checkpoint(job: Job, asked: Operation, *, keyed: bool) -> Decision[Operation]:
    """Raises Conflict if too many wait."""
    waiting = job.operations.running(OperationKind.CREATE_CHECKPOINT)
    if not waiting:
        return _begin(job, asked, _checkpoint_asked(asked))
    to_come = not_begun(job) or [operation for operation in waiting if operation.after]
    if to_come and not keyed:
        return Decision(to_come[0])
    if len(waiting) >= MAX_RUNNING:
        msg = f"{len(waiting)} requests for a checkpoint wait, at most {MAX_RUNNING} are taken"
        raise Conflict(msg, hint="wait for the first of these operations", operation=waiting[0].operation_id)
    if to_come:
        return _begin(job, asked.with_fields(joined=to_come[0].operation_id))
    making = (*job.operations.making(), *waiting)[0]
    return _begin(job, asked.with_fields(after=making.operation_id))


def _checkpoint_asked(asked: Operation) -> Event:
    return _asked_event(asked, "checkpoint_asked", "a checkpoint of one of the next steps")


def _asked_event(asked: Operation, name: str, what: str) -> Event:
    return Event(name, f"{asked.cause}: {what}", operation_fields(asked))


def _begin(job: Job, asked: Operation, *events: Event) -> Decision[Operation]:
    # the number of trainers of a job in its cluster follows from it
    in_force = job.operations.resize_in_force()
    ended = [each for each in job.operations.records.values() if not each.running and each is not in_force]
    ended.sort(key=lambda operation: job.operations.since[operation.operation_id])
    surplus = min(AT_ONCE, max(0, len(ended) + 1 - KEPT_OPERATIONS))
    dropped: list[Change] = [DropOperation(old.operation_id) for old in ended[:surplus]]
    return Decision(asked, (asked, *dropped), events)


def _kept(members: Members) -> tuple[CheckpointRef, ...]:
    return members.latest.kept if members.latest is not None else ()


def abandoned(job: Job) -> set[str]:
    """By uuid: checkpoints newer than one that the job was restored to. They are listed, but no rollback
    chooses them."""
    state = job.state
    mine = {ref.uuid for ref in history(_kept(job.members), state.timeline, state.checkpoint)}
    return {ref.uuid for ref in _kept(job.members)} - mine
