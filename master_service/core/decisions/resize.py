"""A resize of the running job: other numbers of trainers and parameter servers, without a pause of training.

PLANNED --the job runs--> STARTING: numbers written, members come --all there--> MIGRATING
    --all groups moved, members there--> COMMITTED
MIGRATING --a source or target died, or the job went back to a checkpoint--> STARTING
cancelled, or too late: groups that moved stay where they are

A group is moved by the slot map alone: its source has frozen it, its target has everything of it, and both
are the processes that the migration names. The map gives it to the target in one transaction with a new
version. RESTART: members come as before, then a checkpoint is made, and the job goes back to it with the new
slot map.
"""

from __future__ import annotations

from master_service.core import placement
from master_service.core.changes import Change, Decision, DesirePservers, DropMigration, Event
from master_service.core.decisions import recovery
from master_service.core.state.job import Job, end_operation
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, InvalidArgument
from trireme_shared.protocol.records import Dispatch, JobSpec, Mode, Phase, SlotMap
from trireme_shared.protocol.records import Strategy as JobStrategy
from trireme_shared.protocol.records.assignments import GivenNumbers, Group, Handed, Migration
from trireme_shared.protocol.records.cluster import Kind, both_in_words, in_words
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.operations import (
    Operation,
    OperationKind,
    OperationState,
    Resize,
    ResizePhase,
    ResizePrediction,
    Strategy,
    saves_on_demand,
)

MAX_ATTEMPTS = 20
MAX_PSERVERS = 128
SAVING_LIMIT_S = 300.0

# -------------------------------------------------------------------- asking


def wanted(job: Job, trainers: int | None, pservers: int | None, strategy: Strategy) -> Resize:
    """With the job's own numbers where none is given. Raises InvalidArgument, Conflict: the job cannot have
    these numbers."""
    spec, name = job.spec, job.spec.job
    collective = spec.strategy is JobStrategy.COLLECTIVE
    if collective and pservers:
        msg = (
            f"job {name} has strategy collective: its trainers have the parameters, and there are no "
            "parameter servers to resize"
        )
        raise Conflict(msg, hint="resize the trainers only")
    if trainers is None and (pservers is None or collective):
        msg = "a resize needs a number of trainers, of pservers, or both"
        raise InvalidArgument(msg)
    found = Resize(
        trainers=spec.trainers if trainers is None else trainers,
        pservers=spec.pservers if pservers is None else pservers,
        before_trainers=spec.trainers,
        before_pservers=spec.pservers,
        trainers_asked=trainers is not None,
        strategy=strategy,
    )
    if spec.dispatch is Dispatch.ETCD:
        msg = f"job {name} is masterless: nobody leads a resize of it"
        raise Conflict(
            msg, hint="end it and start it again with other numbers; it goes on from its newest checkpoint"
        )
    if job.state.phase.final:
        msg = f"job {name} is {job.state.phase}: there is nothing to resize"
        raise Conflict(msg)
    if collective and found.trainers < spec.min_members:
        msg = (
            f"{in_words('trainer', found.trainers)}: job {name} trains only while {spec.min_members} "
            "have the parameters (min_members)"
        )
        raise InvalidArgument(msg, hint="Ctrl-C, SIGTERM or `trireme cancel` ends a job")
    if not collective and (found.trainers < 1 or found.pservers < 1):
        msg = f"{found.trainers} trainers and {found.pservers} pservers: a job needs one of each at least"
        raise InvalidArgument(msg, hint="Ctrl-C, SIGTERM or `trireme cancel` ends a job")
    if spec.mode is Mode.SYNC and found.trainers > spec.lanes:
        msg = f"{found.trainers} trainers for {spec.lanes} lanes: the others would have nothing to compute"
        raise InvalidArgument(
            msg, hint=f"at most {spec.lanes}; the number of lanes is fixed, results depend on it"
        )
    most = min(spec.slot_count, MAX_PSERVERS)
    if found.pservers > most:
        msg = f"{found.pservers} pservers: at most {most} are possible for {spec.slot_count} slots"
        raise InvalidArgument(msg)
    if found.pservers != spec.pservers and not saves_on_demand(spec):
        msg = (
            f"job {name} has {spec.checkpoint_kind} checkpoints, which load only with as many "
            "parameter servers as before"
        )
        raise Conflict(msg, hint="use coordinated checkpoints, or resize the trainers only")
    return found


def checked(job: Job, asked: Operation) -> Operation:
    """Raises Conflict if another resize runs, and as `wanted`."""
    resize = asked.resize
    assert resize is not None
    for running in job.operations.running(OperationKind.RESIZE):
        msg = f"the job is being resized already ({running.operation_id}: {sentence(running)})"
        raise Conflict(msg, hint="wait for its end, or cancel it", operation=running.operation_id)
    trainers = resize.trainers if resize.trainers_asked else None
    return asked.with_fields(resize=wanted(job, trainers, resize.pservers, resize.strategy))


def is_same(operation: Operation, trainers: int | None, pservers: int | None, strategy: Strategy) -> bool:
    """Whether a repeated request asks for what this operation does."""
    resize = operation.resize
    if resize is None or resize.strategy is not strategy:
        return False
    return trainers in (None, resize.trainers) and pservers in (None, resize.pservers)


def predict(job: Job, resize: Resize) -> ResizePrediction:
    """A dry run: nothing is changed."""
    groups = planned(job, resize.pservers)
    return ResizePrediction(
        trainers=resize.trainers,
        pservers=resize.pservers,
        before_trainers=resize.before_trainers,
        before_pservers=resize.before_pservers,
        slots=sum(len(group.slots) for group in groups),
        groups=len(groups),
        bytes=sum(group.bytes for group in groups),
        by_pserver=placement.moved_bytes(groups),
    )


def sentence(operation: Operation) -> str:
    resize = operation.resize
    assert resize is not None
    trainers = f"{resize.before_trainers} to {resize.trainers} trainers"
    if not resize.before_pservers and not resize.pservers:
        return trainers
    return f"{trainers}, {resize.before_pservers} to {resize.pservers} parameter servers, {resize.strategy}"


def cancel(job: Job, operation: Operation, stamp: str) -> Decision[Operation]:
    """Answers the operation as it ends. Raises Conflict if it has ended, or has gone too far."""
    resize = operation.resize
    if resize is None or not operation.running:
        msg = f"{operation.operation_id} is no resize that runs: there is nothing to cancel"
        raise Conflict(msg)
    if operation.timeline:
        msg = (
            f"{operation.operation_id} loads the new slot map's parameters already: it cannot be "
            "cancelled any more"
        )
        raise Conflict(msg, hint="resize again once it has ended")
    cancelled = _back_out(job, operation, ResizePhase.CANCELLED, "cancelled", stamp, Conflict.code)
    ended = next(change for change in cancelled.changes if isinstance(change, Operation))
    return Decision(ended) + cancelled


def give_up(job: Job, operation: Operation, reason: str, stamp: str) -> Decision[None]:
    """It took too long. The job goes on as it is now."""
    return _back_out(job, operation, None, reason, stamp, DeadlineExceeded.code)


# -------------------------------------------------------------------- progress


def advance(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """What members, slots and the job's state mean for the resize."""
    resize, state, spec = operation.resize, job.state, job.spec
    assert resize is not None
    if state.phase.final:
        reason = f"the job is {state.phase}: {state.reason}"
        return _end(job, operation, ResizePhase.FAILED, reason, stamp, Conflict.code)
    if (resize.pservers == 0) != (spec.strategy is JobStrategy.COLLECTIVE):
        reason = (
            f"the job was started again as {spec.strategy} with {both_in_words(spec.trainers, spec.pservers)}"
        )
        return _map_as_it_is(job) + _end(job, operation, ResizePhase.FAILED, reason, stamp, Conflict.code)
    if resize.phase is ResizePhase.PLANNED:
        return (
            _begin(job, operation)
            if state.phase is Phase.RUNNING and job.members.init_done
            else Decision(None)
        )
    if (spec.trainers, spec.pservers) != (resize.trainers, resize.pservers):
        reason = f"the job was started again with {both_in_words(spec.trainers, spec.pservers)}"
        return _map_as_it_is(job) + _end(
            job, operation, ResizePhase.ROLLED_BACK, reason, stamp, Conflict.code
        )
    if resize.phase is ResizePhase.STARTING:
        return _start(job, operation, stamp)
    if resize.strategy is Strategy.RESTART:
        return _finish(job, operation, stamp) if _is_restarted(job, operation) else Decision(None)
    return _migrate(job, operation, stamp)


def waits_for(job: Job, operation: Operation) -> str:
    """For people."""
    resize, state = operation.resize, job.state
    assert resize is not None
    missing = unclaimed(job, resize)
    if resize.phase is ResizePhase.PLANNED and state.phase is Phase.RUNNING:
        return "the new numbers to be written"
    if state.phase is not Phase.RUNNING:
        return f"the job to run (it is {state.phase}: {state.reason})"
    if missing:
        return f"{len(missing)} of {resize.pservers} parameter servers to register"
    if job.migration is not None:
        return f"slots to move: {resize.groups_moved} of {resize.groups} groups have moved"
    if resize.saving and not operation.timeline:
        return f"a checkpoint ({resize.saving})"
    if not trainers_there(job, resize):
        return f"{in_words('trainer', resize.trainers)} (there are {len(job.trainers.names)})"
    return "the parameter servers to have all parameters"


def lacking(job: Job, operation: Operation) -> Kind | None:
    """The kind of members that it waits for now, if any."""
    resize = operation.resize
    if resize is None or resize.phase is not ResizePhase.STARTING or job.state.phase is not Phase.RUNNING:
        return None
    if unclaimed(job, resize):
        return "pserver"
    return None if trainers_there(job, resize) else "trainer"


def needs_checkpoint(job: Job, operation: Operation, stamp: str) -> Operation | None:
    """The checkpoint that RESTART has to ask for now, if any."""
    resize = operation.resize
    assert resize is not None
    due = resize.strategy is Strategy.RESTART and resize.phase is ResizePhase.STARTING and not resize.saving
    if (
        not due
        or job.state.phase is not Phase.RUNNING
        or unclaimed(job, resize)
        or not planned(job, resize.pservers)
    ):
        return None
    return Operation(
        operation_id=f"{operation.operation_id}-checkpoint",
        kind=OperationKind.CREATE_CHECKPOINT,
        cause="the job is about to be resized",
        limit_s=SAVING_LIMIT_S,
        create_time=stamp,
    )


# -------------------------------------------------------------------- parts


def _begin(job: Job, operation: Operation) -> Decision[None]:
    """The new numbers are written: launchers follow them, and new parameter servers find free indices."""
    resize, spec, slots = operation.resize, job.spec, job.slots
    assert resize is not None
    changes: list[Change] = [
        operation.with_fields(resize=resize.with_fields(phase=ResizePhase.STARTING)),
        _numbers(spec, resize.trainers, resize.pservers),
    ]
    if job.given is None:
        changes.append(GivenNumbers(trainers=spec.trainers, pservers=spec.pservers))
    if spec.strategy is not JobStrategy.COLLECTIVE:
        assert slots is not None
        changes += placed(slots, slots.owners, resize.pservers)
    return Decision(None, tuple(changes))


def _start(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """Once all members are there: the migration is planned, from where the slots are now."""
    resize, state, slots = operation.resize, job.state, job.slots
    assert resize is not None
    if job.spec.strategy is JobStrategy.COLLECTIVE:
        return _finish(job, operation, stamp) if state.phase is Phase.RUNNING else Decision(None)
    if state.phase is not Phase.RUNNING or state.absent or slots is None or unclaimed(job, resize):
        return Decision(None)
    if recovery.why_incomplete(job.spec, state, slots, job.members):
        return Decision(None)
    groups = planned(job, resize.pservers)
    if not groups:
        return _finish(job, operation, stamp)
    if resize.strategy is Strategy.RESTART:
        return _restart(job, operation, groups, stamp)
    if resize.attempt >= MAX_ATTEMPTS:
        return give_up(
            job, operation, f"{MAX_ATTEMPTS} migrations were begun, and none came to its end", stamp
        )
    attempt, pservers = resize.attempt + 1, job.members.pservers
    involved = sorted({index for group in groups for index in (group.source, group.target)})
    members = {str(index): pservers[index].incarnation for index in involved}
    migration = Migration(
        id=f"{operation.operation_id}.{attempt}", timeline=state.timeline, groups=groups, members=members
    )
    joining = {
        name: incarnation
        for name, incarnation in members.items()
        if not recovery.has_parameters(state, job.members, int(name))
    }
    progress = resize.with_fields(
        phase=ResizePhase.MIGRATING,
        attempt=attempt,
        groups=resize.groups_moved + len(groups),
        slots=sum(len(group.slots) for group in groups) if attempt == 1 else resize.slots,
        bytes=sum(group.bytes for group in groups) if attempt == 1 else resize.bytes,
    )
    changes: tuple[Change, ...] = (operation.with_fields(resize=progress), migration)
    if joining:
        changes = (*changes, state.with_fields(joined={**state.joined, **joining}))
    message = (
        f"{len(groups)} groups of slots move between parameter servers {', '.join(map(str, involved[:8]))}"
    )
    event = Event(
        "migration_begun",
        message,
        {"operation": operation.operation_id, "groups": len(groups), "attempt": attempt},
    )
    return Decision(None, changes, (event,))


def _restart(job: Job, operation: Operation, groups: tuple[Group, ...], stamp: str) -> Decision[None]:
    """Back to the checkpoint that was made for it, with the new slot map."""
    resize, slots, layout = operation.resize, job.slots, job.members.layout
    assert resize is not None
    saving = job.operations.records.get(resize.saving)
    if saving is None or saving.running or slots is None or layout is None:
        return Decision(None)
    ref = recovery.ref_of(job.members.latest, saving.checkpoint_id)
    if ref is None:
        return give_up(job, operation, f"there is no checkpoint to restart from: {saving.reason}", stamp)
    owners = placement.planned_owners(layout, slots, resize.pservers, sum(rows_bytes(job).values()))
    size, count = sum(group.bytes for group in groups), sum(len(group.slots) for group in groups)
    begun = operation.with_fields(
        resize=resize.with_fields(phase=ResizePhase.MIGRATING, bytes=size, slots=count, groups=len(groups))
    )
    begun = begun.with_fields(timeline=job.state.generation + 1)
    back = recovery.back_to(job.spec, job.state, slots, ref, f"the job is resized ({sentence(operation)})")
    return Decision(None, (begun,)) + back + Decision(None, placed(slots, owners, resize.pservers))


def _is_restarted(job: Job, operation: Operation) -> bool:
    return job.state.phase is Phase.RUNNING and job.state.timeline >= operation.timeline


def _migrate(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """Groups whose targets have everything get their new owners; then the sources forget them."""
    resize, migration, slots, state = operation.resize, job.migration, job.slots, job.state
    assert resize is not None
    if migration is None or slots is None or (why := obstacle(job, migration)):
        again = operation.with_fields(
            resize=resize.with_fields(phase=ResizePhase.STARTING, bytes_before=resize.bytes_moved)
        )
        message = (
            "the migration is planned again: "
            f"{why if migration is not None and slots is not None else 'it is gone'}"
        )
        return Decision(
            None,
            (again, DropMigration()),
            (Event("migration_ended", message, {"operation": operation.operation_id}),),
        )
    handed = {
        index: handed_of(job, migration, index)
        for index in sorted({group.source for group in migration.groups})
    }
    due = [
        group
        for group in migration.groups
        if group.number in handed[group.source].groups and slots.owners[group.slots[0]] != group.target
    ]
    if due and state.phase is Phase.RUNNING and not state.absent:
        return move(job, operation, due, handed)
    moved = sum(slots.owners[group.slots[0]] == group.target for group in migration.groups)
    forgotten = all(
        each.forgotten == sum(group.source == index for group in migration.groups)
        for index, each in handed.items()
    )
    if moved == len(migration.groups) and forgotten:
        return _finish(job, operation.with_fields(resize=measured(resize, handed)), stamp)
    return Decision(None)


def _finish(job: Job, operation: Operation, stamp: str) -> Decision[None]:
    """All slots are where they shall be. It is done once as many trainers are there."""
    resize = operation.resize
    assert resize is not None
    closing: tuple[Change, ...] = (DropMigration(),) if job.migration is not None else ()
    if not trainers_there(job, resize):
        waiting = operation.with_fields(resize=resize.with_fields(phase=ResizePhase.STARTING))
        return Decision(None, (waiting, *closing)) if closing or waiting != operation else Decision(None)
    done = operation.with_fields(resize=resize.with_fields(phase=ResizePhase.COMMITTED))
    reason = both_in_words(resize.trainers, resize.pservers)
    if resize.groups_moved:
        groups = f"{resize.groups_moved} group{'' if resize.groups_moved == 1 else 's'}"
        reason += f"; {groups} moved, the longest pause was {resize.longest_pause_s:.3f} s"
    return Decision(None, (*closing, DesirePservers(resize.pservers))) + end_operation(
        done, OperationState.DONE, reason, stamp
    )


def _back_out(
    job: Job, operation: Operation, phase: ResizePhase | None, reason: str, stamp: str, code: str
) -> Decision[None]:
    """The job keeps the slots as they are now, and wants as many members as they need. `phase` None: by what
    has moved."""
    resize, slots = operation.resize, job.slots
    assert resize is not None
    if job.spec.strategy is JobStrategy.COLLECTIVE and resize.phase is not ResizePhase.PLANNED:
        numbers = _numbers(job.spec, resize.before_trainers, 0)
        why = f"{reason}; the job wants {in_words('trainer', resize.before_trainers)} as before"
        return Decision(None, (numbers,)) + _end(
            job, operation, phase or ResizePhase.FAILED, why, stamp, code
        )
    if resize.phase is ResizePhase.PLANNED or slots is None:
        return _end(
            job, operation, phase or ResizePhase.FAILED, f"{reason}; nothing was changed", stamp, code
        )
    pservers = max(max(slots.owners) + 1, min(resize.before_pservers, resize.pservers))
    if not resize.groups_moved:
        pservers = max(pservers, resize.before_pservers)
    stay = (
        f"{resize.groups_moved} of {resize.groups} groups had moved and stay where they are"
        if resize.groups_moved
        else "nothing has moved"
    )
    ended = phase or (ResizePhase.ROLLED_BACK if resize.groups_moved else ResizePhase.FAILED)
    numbers = _numbers(job.spec, resize.before_trainers, pservers)
    changes = (numbers, *placed(slots, slots.owners, pservers))
    return Decision(None, changes) + _end(job, operation, ended, f"{reason}; {stay}", stamp, code)


def _end(
    job: Job, operation: Operation, phase: ResizePhase, reason: str, stamp: str, code: str
) -> Decision[None]:
    closing: tuple[Change, ...] = (DropMigration(),) if job.migration is not None else ()
    assert operation.resize is not None
    ended = operation.with_fields(resize=operation.resize.with_fields(phase=phase))
    return Decision(None, closing) + end_operation(ended, OperationState.FAILED, reason, stamp, code=code)


def _map_as_it_is(job: Job) -> Decision[None]:
    """Nobody moves slots on: a map that is made for another number than its slots' owners says so, and the
    job goes back to a checkpoint with a fresh map (lost.slots_fit). Else it would wait for owners that are
    not started any more."""
    slots = job.slots
    if slots is None or max(slots.owners) + 1 == slots.wanted:
        return Decision(None)
    return Decision(None, (slots.with_fields(version=slots.version + 1, pservers=0),))


def _numbers(spec: JobSpec, trainers: int, pservers: int) -> JobSpec:
    return spec.with_fields(trainers=trainers, pservers=pservers)


# -------------------------------------------------------------------- groups of slots
# On their way from source to target:
# source: `handed` in ps/<index> --the same migration, timeline and processes--> a new slot map: the target
#     owns the group


def rows_bytes(job: Job) -> dict[int, int]:
    """Of embedding tables, by parameter server: about so many would be sent."""
    return {index: member.rows_bytes for index, member in job.members.pservers.items()}


def move(job: Job, operation: Operation, due: list[Group], handed: dict[int, Handed]) -> Decision[None]:
    """One new slot map."""
    slots, resize = job.slots, operation.resize
    assert slots is not None
    assert resize is not None
    owners = list(slots.owners)
    losses = job.losses
    for group in due:
        for slot in group.slots:
            owners[slot] = group.target
        losses = _inherited(losses, group)
    grown = operation.with_fields(
        resize=measured(resize, handed).with_fields(groups_moved=resize.groups_moved + len(due))
    )
    inherited = (losses,) if losses != job.losses else ()
    new = slots.with_fields(version=slots.version + 1, owners=tuple(owners))
    return Decision(None, (new, grown, *inherited))


def _inherited(losses: Losses, group: Group) -> Losses:
    """Blocks bring what they lack along: each block of the target lacks at most as much as the worse of
    both."""
    source, target = str(group.source), str(group.target)
    lost, skipped = losses.lost, losses.skipped
    if source not in lost and source not in skipped:
        return losses
    return losses.with_lost(
        group.target,
        max(lost.get(target, 0), lost.get(source, 0)),
        max(skipped.get(target, 0), skipped.get(source, 0)),
    )


def obstacle(job: Job, migration: Migration) -> str:
    """Why what is handed over does not count any more, or ""."""
    if migration.timeline != job.state.timeline:
        return "the job went back to a checkpoint"
    for name, incarnation in migration.members.items():
        member = job.members.pservers.get(int(name))
        if member is None or member.incarnation != incarnation:
            pserver = f"pserver-{name}"
            return job.members.absence(pserver) if member is None else f"{pserver} was replaced"
        if member.handed is not None and member.handed.migration == migration.id and member.handed.failed:
            return member.handed.failed
    return ""


def handed_of(job: Job, migration: Migration, index: int) -> Handed:
    member = job.members.pservers.get(index)
    known = member.handed if member is not None else None
    return known if known is not None and known.migration == migration.id else Handed(migration=migration.id)


def measured(resize: Resize, handed: dict[int, Handed]) -> Resize:
    """`resize` with what this migration has measured so far; attempts before it count, too."""
    sent = sum(each.bytes for each in handed.values())
    longest = max([resize.longest_pause_s, *(each.longest_pause_s for each in handed.values())])
    return resize.with_fields(bytes_moved=resize.bytes_before + sent, longest_pause_s=longest)


def placed(slots: SlotMap, owners: tuple[int, ...], pservers: int) -> tuple[Change, ...]:
    """A new version of the map, and as many indices as it and the target number need."""
    new = SlotMap(version=slots.version + 1, owners=owners, pservers=pservers)
    return new, DesirePservers(max(pservers, max(owners) + 1))


def planned(job: Job, pservers: int) -> tuple[Group, ...]:
    """What has to move from where the slots are now to `pservers` parameter servers."""
    layout, slots = job.members.layout, job.slots
    if layout is None or slots is None or not job.members.init_done or not pservers:
        return ()
    return placement.planned_groups(layout, job.spec.mode, slots, pservers, rows_bytes(job))


def unclaimed(job: Job, resize: Resize) -> list[int]:
    """Indices of parameter servers that nobody has claimed."""
    return [index for index in range(resize.pservers) if index not in job.members.pservers]


def trainers_there(job: Job, resize: Resize) -> bool:
    """Whether as many train as it asks for."""
    count = len(job.trainers.names)
    if resize.trainers == resize.before_trainers:
        return count == resize.trainers or not resize.trainers_asked
    return count >= resize.trainers if resize.trainers > resize.before_trainers else count <= resize.trainers
