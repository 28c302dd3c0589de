"""Parameters are lost: whether, to which checkpoint the job goes back, when all have loaded it, and which
parameter server returns alone.

RUNNING --parameters lost--> ROLLING_BACK(timeline, checkpoint)
   |                            |   ^  |-- every pserver has it, queue restored --> RUNNING
   |                            |   |  |-- none left --> FAILED
   |                            |   |  `-- only the initial parameters were saved --> dropped, WAITING
   |                            +---+ cannot be used: the checkpoint before it, in a newer timeline
   +-- there is no checkpoint yet --> WAITING: from the very start, with new members

A parameter server says in its own key which checkpoint it has loaded, in which timeline. In a timeline
without a checkpoint those that were there when the parameters got their first values have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from master_service.core.changes import (
    Change,
    Decision,
    DesirePservers,
    Event,
    Fields,
    ForgetParameters,
    NextEpoch,
    RestartQueue,
)
from master_service.core.decisions import evaluation
from master_service.core.decisions.lifecycle import fail, next_stage
from master_service.core.placement import fresh_map, holders, new_list, slots_fit
from master_service.core.state import phases
from master_service.core.state.job import Job, Members
from trireme_shared.checkpoints.schedule import way_back
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.evaluations import results_count
from trireme_shared.protocol.records import (
    EvaluationSums,
    FailureCause,
    JobSpec,
    JobState,
    Mode,
    Phase,
    PserverMember,
    SlotMap,
    Stage,
    Strategy,
    TaskKind,
    TrainerList,
    UserFailure,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, history, saved_point
from trireme_shared.protocol.records.job import Losses


@dataclass(frozen=True, slots=True)
class MissingParameters:
    """Why parameters are missing."""

    cause: str
    #: Nothing has failed: the members that had the parameters were told to leave.
    asked: bool = False


def why_incomplete(
    spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members, listed: TrainerList | None = None
) -> MissingParameters | None:
    """Return why parameters of the job are missing, or None if none are. `listed` are the trainers of the
    last generation: they tell a job that goes on with other members from a job that lost some of its
    members."""
    if slots is not None and not slots_fit(slots, spec):
        return another_number(spec, slots)
    if listed is not None and all_ended(spec, state, listed, slots, members):
        return MissingParameters("all previous members have left", asked=True)
    for index in holders(spec, slots):
        if not has_parameters(state, members, index):
            return who_is_missing(members, index)
        torn = members.pservers[index].torn
        if torn is not None and torn.timeline == state.timeline:
            return MissingParameters(torn.cause)
    return None


def another_number(spec: JobSpec, slots: SlotMap) -> MissingParameters:
    """The job wants another number of parameter servers than its slot map was made for."""
    return MissingParameters(f"the job has {spec.pservers} parameter servers now instead of {slots.wanted}")


def who_is_missing(members: Members, index: int) -> MissingParameters:
    """A pserver without the job's parameters, whether another one has its index already or not."""
    name = f"pserver-{index}"
    if name in members.left or index not in members.pservers:
        return MissingParameters(members.absence(name), asked=name in members.left)
    return MissingParameters(f"{name} was replaced by an empty one")


def all_ended(
    spec: JobSpec, state: JobState, listed: TrainerList, slots: SlotMap | None, members: Members
) -> bool:
    """Whether all previous members have left: the job was paused, or its cluster ended."""
    holding = any(has_parameters(state, members, index) for index in holders(spec, slots))
    return not holding and not any(name in members.trainers for name in listed.names)


def has_parameters(state: JobState, members: Members, index: int) -> bool:
    """Whether that pserver has the parameters of the job's timeline, by its own key in etcd."""
    member = members.pservers.get(index)
    if member is None:
        return False
    if state.joined.get(str(index)) == member.incarnation:
        return True
    restored = member.restored
    if restored is not None and restored.rejoined and restored.timeline == state.timeline:
        return state.mends.get(str(index)) == member.incarnation and not restored.error
    if state.checkpoint:
        return (
            restored is not None
            and not restored.error
            and (restored.timeline, restored.checkpoint) == (state.timeline, state.checkpoint)
        )
    registered = member.since or members.pserver_revisions.get(index, 0)
    registered_after_layout = (
        0 < members.layout_revision < registered
    )  # it was not there when the first values were pushed
    return not registered_after_layout


def survivors(spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members) -> list[PserverMember]:
    """Pservers that still hold parameters while others lost theirs and no checkpoint exists. They have to
    leave, so that all start empty."""
    placed = slots if slots is not None and slots_fit(slots, spec) else None
    lost = members.init_done and bool(why_incomplete(spec, state, placed, members))
    saved = state.checkpoint or members.latest is not None or members.own
    if state.phase.final or state.phase is Phase.CHECKPOINTING or saved or not lost:
        return []  # a checkpoint that is being made may still become the first one
    return [
        members.pservers[index] for index in sorted(members.pservers) if has_parameters(state, members, index)
    ]


# -------------------------------------------------------------------- rollback


def go_back(
    spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members, why: MissingParameters
) -> Decision[None]:
    """Parameters are lost: back to the newest checkpoint. Without one, back to the start, once no pserver
    holds any."""
    cause = why.cause
    if members.latest is not None:
        none_left = f"{cause} and no checkpoint is left that could be loaded"
        return _back_to_best(spec, state, slots, members.latest, cause, none_left, asked=why.asked)
    if survivors(spec, state, slots, members):
        return Decision(None)
    return start_over(spec, state, slots, f"{cause} and no checkpoint exists yet: training starts over")


def _back_to_best(
    spec: JobSpec,
    state: JobState,
    slots: SlotMap | None,
    latest: CheckpointLatest,
    cause: str,
    none_left: str,
    *,
    asked: bool = False,
) -> Decision[None]:
    """To the newest usable checkpoint. Without one the job fails, except where only the initial parameters
    are lost: new ones have the same bits."""
    usable = _usable(state, latest)
    if usable:
        return back_to(spec, state, slots, usable[0], cause, asked=asked)
    if spec.mode is Mode.SYNC and not any(ref.step for ref in latest.kept):
        return back_to_start(state, f"{cause}; only the initial parameters were saved: training starts over")
    return fail(state, none_left, FailureCause.STORAGE)


def back_to_start(state: JobState, reason: str) -> Decision[None]:
    """All pservers drop what they have, in a new timeline without a checkpoint; `supervise` starts over once
    they have."""
    dropping = phases.rolling_back(state, "", reason)
    fields: Fields = {"cause": reason, "step": 0, "checkpoint": "", "timeline": dropping.timeline}
    return Decision(None, (dropping,), (Event("rolling_back", reason, fields),))


def start_over(spec: JobSpec, state: JobState, slots: SlotMap | None, reason: str) -> Decision[None]:
    """From the very start. No member may hold parameters of the timeline that begins."""
    restarted = phases.started_over(state, reason)
    others = [TaskKind.EXPORT, *([TaskKind.EVALUATE] if spec.evaluation_dataset else [])]
    emptied: list[Change] = [*map(RestartQueue, others), EvaluationSums(), Losses()]
    emptied += evaluation.started_over(spec, restarted)
    nobody = TrainerList(generation=restarted.generation)
    placed: tuple[Change, ...] = ()
    if slots is not None and not (slots_fit(slots, spec) and max(slots.owners) + 1 == spec.pservers):
        # a resize may have been moving them: nothing is left that could move
        placed = _new_slots(spec, slots)
    changes = (restarted, nobody, ForgetParameters(), *placed, *emptied, NextEpoch(0))
    return Decision(None, changes, (Event("started_over", reason, {"cause": reason}),))


def supervise(spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members) -> Decision[None]:
    """While pservers load: another checkpoint if one of them cannot, a new rollback if the number of pservers
    changed, a slot map if there is none."""
    if slots is not None and not slots_fit(slots, spec):
        return go_back(spec, state, slots, members, another_number(spec, slots))
    if not state.checkpoint:
        return (
            start_over(spec, state, slots, state.reason)
            if _all_dropped(spec, state, members)
            else Decision(None)
        )
    if slots is None:  # the job was a collective one when it began to go back
        return Decision(None, _new_slots(spec, slots))
    for index in sorted(members.pservers):
        restored = members.pservers[index].restored
        if (
            restored is not None
            and restored.error
            and (restored.timeline, restored.checkpoint) == (state.timeline, state.checkpoint)
        ):
            if restored.superseded:
                return choose_again(spec, state, slots, members.latest)
            return fall_back(spec, state, slots, members.latest, f"pserver-{index}: {restored.error}")
    return Decision(None)


def _all_dropped(spec: JobSpec, state: JobState, members: Members) -> bool:
    """Whether every pserver is there and says that it has no parameters in this timeline."""
    said = [members.pservers[index].restored for index in range(spec.pservers) if index in members.pservers]
    return len(said) == spec.pservers and all(
        each and (each.timeline, each.checkpoint) == (state.timeline, "") for each in said
    )


def is_restored(spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members) -> bool:
    """Whether all parameter servers have the checkpoint's parameters; collective: min_members trainers."""
    if spec.strategy is Strategy.COLLECTIVE:
        loaded = members.holding(state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and len(loaded) >= spec.min_members
    whole = slots is not None and not why_incomplete(spec, state, slots, members)
    return state.phase is Phase.ROLLING_BACK and whole


def ref_of(latest: CheckpointLatest | None, uuid: str) -> CheckpointRef | None:
    return next((ref for ref in latest.kept if ref.uuid == uuid), None) if latest else None


def fall_back(
    spec: JobSpec, state: JobState, slots: SlotMap | None, latest: CheckpointLatest | None, error: str
) -> Decision[None]:
    """The checkpoint of this rollback cannot be used: take the one before it, or fail the job."""
    if state.phase is not Phase.ROLLING_BACK:
        return Decision(None)
    fields: Fields = {"checkpoint": state.checkpoint, "cause": error}
    warning: Decision[None] = Decision(None, (), (Event("checkpoint_unusable", error, fields),))
    damaged = state.checkpoint
    state = state.with_fields(damaged=(*state.damaged, damaged))
    none_left = f"no checkpoint is left that could be loaded; the last one tried: {error}"
    if latest is None:
        return warning + fail(state, none_left, FailureCause.STORAGE)
    cause = f"checkpoint {damaged} cannot be used"
    return warning + _back_to_best(spec, state, slots, latest, cause, none_left)


def choose_again(
    spec: JobSpec, state: JobState, slots: SlotMap | None, latest: CheckpointLatest | None
) -> Decision[None]:
    """The chosen checkpoint was deleted: just before, a newer one of the old timeline had become the
    latest."""
    if (
        state.phase is not Phase.ROLLING_BACK
        or latest is None
        or ref_of(latest, state.checkpoint) is not None
    ):
        return Decision(None)  # the pserver has seen a later revision of etcd than this master
    newest = next((ref for ref in latest.kept if ref.uuid not in state.damaged), None)
    cause = f"a newer checkpoint had taken the place of {state.checkpoint}"
    if newest is None:
        return fail(state, f"{cause}, and all that are kept are damaged", FailureCause.STORAGE)
    return back_to(spec, state, slots, newest, cause)


def _usable(state: JobState, latest: CheckpointLatest) -> tuple[CheckpointRef, ...]:
    """Checkpoints to go back to, newest first: of the job's own history, and not damaged.

    Those that a restoration left behind are not in the history. If the checkpoint that the timeline began
    with is not kept any more, all that are kept count: it was deleted as the timeline began.
    """
    mine = history(latest.kept, state.timeline, state.checkpoint) or latest.kept
    return tuple(ref for ref in mine if ref.uuid not in state.damaged)


def back_to(
    spec: JobSpec,
    state: JobState,
    slots: SlotMap | None,
    ref: CheckpointRef,
    cause: str,
    *,
    asked: bool = False,
) -> Decision[None]:
    """All pservers load that checkpoint, in a new timeline. `asked`: see MissingParameters."""
    follows = "training continues from" if asked else "the job goes back to"
    reason = f"{cause}: {follows} {saved_point(spec.mode, ref.step)}"
    back = phases.rolling_back(state, ref.uuid, reason)
    fields: Fields = {
        "cause": cause,
        "step": ref.step,
        "checkpoint": ref.uuid,
        "timeline": back.timeline,
    }
    fits = spec.strategy is Strategy.COLLECTIVE or (slots is not None and slots_fit(slots, spec))
    placed = () if fits else _new_slots(spec, slots)  # without any: the job was a collective one
    return Decision(None, (back, *placed), (Event("rolling_back", reason, fields),))


def _new_slots(spec: JobSpec, slots: SlotMap | None) -> tuple[Change, ...]:
    """All slots spread anew over as many parameter servers as the job wants."""
    return fresh_map(spec, slots), DesirePservers(spec.pservers)


def stage_at(spec: JobSpec, stage: Stage, epoch: int) -> Stage:
    """TRAIN if any training is left; else the stage stays, and what follows training is not undone."""
    if epoch < spec.epochs:
        return Stage.TRAIN
    return next_stage(spec, stage) if stage is Stage.TRAIN else stage


def resume(job: Job, epoch: int, step: int, *, records: int, seconds: float) -> Decision[bool]:
    """RUNNING again with the trainers that are there (collective: those that have the parameters), if all
    pservers have the parameters. Answers whether it is.

    `epoch`: the epoch of the checkpoint.
    """
    spec, state, members = job.spec, job.state, job.members
    if not is_restored(spec, state, job.slots, members):
        return Decision(False)
    held = members.holding(state.timeline, state.checkpoint)
    trainers = held if spec.strategy is Strategy.COLLECTIVE else tuple(members.trainers)
    generation = state.generation + 1
    place = saved_point(spec.mode, step)
    reason = f"back at {place}" + ("" if trainers else "; waiting for a trainer")
    running = phases.restored(state, stage_at(spec, state.stage, epoch), reason)
    changes: tuple[Change, ...] = (
        new_list(spec, job.trainers, generation, trainers, job.speeds.lane_s),
        running,
    )
    message = f"rolled back to {place} in {seconds:.1f} s; {records} records are trained again"
    fields: Fields = {
        "step": step,
        "checkpoint": state.checkpoint,
        "timeline": state.timeline,
        "generation": generation,
        "records_replayed": records,
        "seconds": round(seconds, 3),
    }
    return Decision(True, changes, (Event("rolled_back", message, fields),))


# -------------------------------------------------------------------- asynchronous
# A parameter server is gone, and the others continue:
# complete --pserver gone--> absent --back, with a checkpoint's ledger--> counted, its losses are on record:
#          |                   |                                          generation + 1
#          |                   |-- the same process, whose lease had run out: it has everything, nothing is
#          |                   |   lost
#          |                   `-- no checkpoint of its own (independent), or away too long: FAILED
#          `-- no pserver left, nothing saved, or training is over: the whole job goes back, nothing is lost


def handle_missing(
    spec: JobSpec, state: JobState, listed: TrainerList, slots: SlotMap | None, members: Members
) -> Decision[None]:
    """Record missing parameter servers as absent, or go back, or fail. Nothing more once they are
    recorded."""
    if not members.init_done:
        return Decision(None)
    independent = spec.checkpoint_kind == "independent"
    if slots is not None and not slots_fit(slots, spec):
        why = another_number(spec, slots)
        if independent:
            return fail(
                state,
                f"{why.cause}, and independent checkpoints load only with as many; start it with "
                "as many as before",
                FailureCause.MEMBERS,
            )
        return go_back(spec, state, slots, members, why)
    needed = holders(spec, slots)
    away = [index for index in needed if not has_parameters(state, members, index)]
    if whole := [index for index in state.absent if index in needed and index not in away]:
        return _back_whole(state, whole)
    if not away:
        return Decision(None)
    why = why_incomplete(spec, state, slots, members, listed) or who_is_missing(members, away[0])
    if members.latest is None and not any(index in members.own for index in needed):
        return go_back(spec, state, slots, members, why)
    for index in away:
        member = members.pservers.get(index)
        if (
            member is not None
            and member.restored is not None
            and member.restored.error
            and is_back(state, member)
        ):
            return fail(
                state, f"pserver-{index} cannot come back: {member.restored.error}", FailureCause.STORAGE
            )
    # evaluation must see one set of parameters
    over = state.stage is not Stage.TRAIN and members.latest is not None
    if not independent and (over or len(away) == len(needed)):
        return go_back(spec, state, slots, members, why)
    if independent and (without := [index for index in away if index not in members.own]):
        return fail(
            state,
            f"{members.absence(f'pserver-{without[0]}')} and no checkpoint of it exists yet; start "
            "the job again",
            FailureCause.MEMBERS,
        )
    new = [index for index in away if index not in state.absent]
    if not new:
        return Decision(None)
    absent = tuple(sorted({*state.absent, *new}))
    returns = "its successor loads" if f"pserver-{new[0]}" in members.left else "it comes back from"
    message = f"{members.absence(f'pserver-{new[0]}')}; {returns} its newest checkpoint, the others go on"
    event = Event("pserver_lost", message, {"pserver": new[0], "absent": len(absent)})
    return Decision(None, (state.with_fields(absent=absent, reason=message),), (event,))


def _back_whole(state: JobState, whole: list[int]) -> Decision[None]:
    """Absent parameter servers that were never gone: only their leases had run out."""
    absent = tuple(index for index in state.absent if index not in whole)
    message = f"pserver-{whole[0]} is back with its parameters: its lease had run out, nothing is lost"
    event = Event(
        "pserver_back", message, {"pserver": whole[0], "lost_minibatches": 0, "absent": len(absent)}
    )
    return Decision(None, (state.with_fields(absent=absent, reason=message),), (event,))


def is_back(state: JobState, member: PserverMember) -> bool:
    """Whether it wrote in this timeline that it rejoined, or could not, and that is not on record yet."""
    restored = member.restored
    return (
        restored is not None
        and restored.rejoined
        and restored.timeline == state.timeline
        and state.mends.get(str(member.index)) != member.incarnation
    )


def returned(state: JobState, members: Members) -> list[PserverMember]:
    """Pservers that have loaded a checkpoint and serve once their losses are on record."""
    restored = [
        member
        for member in members.pservers.values()
        if member.restored is not None and not member.restored.error
    ]
    return [member for member in restored if is_back(state, member)]


def is_outdated(state: JobState, generation: int | None) -> bool:
    """Whether a task whose first push was in `generation` may be missing at a pserver that came back since.
    Then it is given again. The pserver takes pushes once its losses are on record, so what was done before
    that was counted; whoever trains it still gives it up (AsyncLoop)."""
    return generation is not None and generation < state.mended


def record_return(job: Job, member: PserverMember, lost: int, before: tuple[int, int]) -> Decision[bool]:
    """Record what `member` lacks. `lost`: minibatches since its checkpoint; `before`: (lost, skipped) at the
    checkpoint."""
    state, restored = job.state, member.restored
    if restored is None or job.members.pservers.get(member.index) != member or not is_back(state, member):
        return Decision(False)
    generation = state.generation + 1
    absent = tuple(index for index in state.absent if index != member.index)
    message = (
        f"pserver-{member.index} is back from checkpoint {restored.checkpoint[:8]}: it lacks {lost:,} "
        "minibatches of closed tasks"
    )
    back = state.with_fields(
        generation=generation,
        mended=generation,
        mends={**state.mends, str(member.index): member.incarnation},
        absent=absent,
        reason=message,
    )
    losses = job.losses.with_lost(member.index, before[0] + lost, before[1])
    fields: Fields = {"pserver": member.index, "lost_minibatches": lost}
    events = [
        Event(
            "pserver_back", message, {**fields, "checkpoint": restored.checkpoint, "generation": generation}
        )
    ]
    if restored.damaged:
        events.insert(0, Event("checkpoint_unusable", restored.damaged, {"pserver": member.index}))
    return Decision(True, (back, losses), tuple(events))


# -------------------------------------------------------------------- evaluation
# The checkpoint of an evaluation is lost, and the result depends on it:
# a later checkpoint is the latest, or its files are damaged ─► back to the newest checkpoint before it
#     ─► the version is made, saved and evaluated
# the first evaluation, before any checkpoint was there ─► training starts over
# no such checkpoint is kept, or MOST_REDONE times ─► left out (evaluation.begin, evaluation.leave_out)

MOST_REDONE = 3


def is_evaluation_lost(job: Job) -> bool:
    """Whether the checkpoint of the first evaluation that is not over cannot come any more, and the job can
    go back for it."""
    state, status, mine = job.state, job.evaluation, evaluation.of_history(job)
    stands = state.phase is not Phase.RUNNING or state.stage not in (Stage.TRAIN, Stage.EVALUATE)
    if stands or not mine or status.timeline != state.timeline:
        return False
    number = status.settled + 1
    due = any(ref.evaluation == number and ref.uuid not in state.damaged for ref in mine)
    if status.running is not None or due or status.stops_before(number) or mine[0].leads_to(number):
        return False
    return _way_back(job, number) is not None or _begins_anew(job, mine)


def go_back_for_evaluation(job: Job) -> Decision[bool]:
    """Answers whether the job goes back."""
    if not is_evaluation_lost(job):
        return Decision(False)
    number = job.evaluation.settled + 1
    return Decision(True) + _redo(job, number, f"the checkpoint of evaluation {number} was not written")


def give_up_evaluation(job: Job, failure: UserFailure | None, cause: str) -> Decision[None]:
    """The checkpoint of the evaluation that runs could not be read: the job goes back if its files are
    damaged, else goes on without."""
    running = job.evaluation.running
    assert running is not None
    damaged = failure is not None and failure.error_type == CheckpointUnusable.code
    if (
        damaged
        and job.state.phase is Phase.RUNNING
        and _way_back(job, running.number, running.ref.uuid) is not None
    ):
        return _redo(
            job, running.number, f"the checkpoint of evaluation {running.number} is damaged", running.ref.uuid
        )
    return evaluation.leave_out(job, running.number, cause)


def _way_back(job: Job, number: int, damaged: str = "") -> CheckpointRef | None:
    latest, mine, (redone, times) = job.members.latest, evaluation.of_history(job), job.evaluation.redone
    if latest is None or not mine or (redone == number and times >= MOST_REDONE):
        return None
    return way_back(job.spec, number, latest.kept, mine[0], {*job.state.damaged, damaged})


def _begins_anew(job: Job, mine: Sequence[CheckpointRef]) -> bool:
    """Whether no checkpoint was there yet before the version of the first evaluation. From then on one is
    kept from which it can be made again."""
    if job.evaluation.settled or job.state.damaged or not results_count(job.spec):
        return False
    return not any(ref.evaluated_before is None or ref.leads_to(1) for ref in mine)


def _redo(job: Job, number: int, cause: str, damaged: str = "") -> Decision[None]:
    ref, (redone, times) = _way_back(job, number, damaged), job.evaluation.redone
    if ref is None:
        return back_to_start(job.state, f"{cause}, and no checkpoint before it: training starts over")
    state = job.state.with_fields(damaged=(*job.state.damaged, damaged)) if damaged else job.state
    counted = job.evaluation.with_fields(redone=(number, times + 1 if redone == number else 1))
    return Decision(None, (counted,)) + back_to(job.spec, state, job.slots, ref, cause)
