"""Rollback after parameters were lost: to which checkpoint, when every pserver has loaded it, and where training continues.

RUNNING --parameters lost--> ROLLING_BACK(timeline, checkpoint) --every pserver has it, queue restored--> RUNNING
   |                            |    ^ cannot be used: the checkpoint before it, in a newer timeline
   |                            +----+---- none left ----> FAILED; only the initial parameters were saved: dropped -> WAITING
   +-- there is no checkpoint yet --> WAITING: from the very start, with new members
"""

from __future__ import annotations

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
from master_service.core.decisions.evaluations import evaluation
from master_service.core.decisions.lifecycle import fail, next_stage
from master_service.core.decisions.recovery.lost import (
    MissingParameters,
    another_number,
    slots_fit,
    survivors,
    why_incomplete,
)
from master_service.core.placement.lanes import new_list
from master_service.core.state import phases
from master_service.core.state.job import Job
from master_service.core.state.members import Members
from trireme_shared.protocol.records import (
    EvaluationSums,
    FailureCause,
    JobSpec,
    JobState,
    Mode,
    Phase,
    SlotMap,
    Stage,
    Strategy,
    TaskKind,
    TrainerList,
)
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, history, saved_point
from trireme_shared.protocol.records.job import Losses


def go_back(
    spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members, why: MissingParameters
) -> Decision[None]:
    """Parameters are lost: back to the newest checkpoint. Without one, back to the start, once no pserver holds any."""
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
    """To the newest usable checkpoint. Without one the job fails, except where only the initial parameters are lost: new ones
    have the same bits."""
    usable = _usable(state, latest)
    if usable:
        return back_to(spec, state, slots, usable[0], cause, asked=asked)
    if spec.mode is Mode.SYNC and not any(ref.step for ref in latest.kept):
        return back_to_start(state, f"{cause}; only the initial parameters were saved: training starts over")
    return fail(state, none_left, FailureCause.STORAGE)


def back_to_start(state: JobState, reason: str) -> Decision[None]:
    """All pservers drop what they have, in a new timeline without a checkpoint; `supervise` starts over once they have."""
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
        placed = _new_slots(spec, slots)  # a resize may have been moving them: nothing is left that could move
    changes = (restarted, nobody, ForgetParameters(), *placed, *emptied, NextEpoch(0))
    return Decision(None, changes, (Event("started_over", reason, {"cause": reason}),))


def supervise(spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members) -> Decision[None]:
    """While pservers load: another checkpoint if one of them cannot, a new rollback if the number of pservers changed, a slot map if there is none."""
    if slots is not None and not slots_fit(slots, spec):
        return go_back(spec, state, slots, members, another_number(spec, slots))
    if not state.checkpoint:
        return start_over(spec, state, slots, state.reason) if _all_dropped(spec, state, members) else Decision(None)
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
    """The chosen checkpoint was deleted: just before, a newer one of the old timeline had become the latest."""
    if state.phase is not Phase.ROLLING_BACK or latest is None or ref_of(latest, state.checkpoint) is not None:
        return Decision(None)  # the pserver has seen a later revision of etcd than this master
    newest = next((ref for ref in latest.kept if ref.uuid not in state.damaged), None)
    cause = f"a newer checkpoint had taken the place of {state.checkpoint}"
    if newest is None:
        return fail(state, f"{cause}, and all that are kept are damaged", FailureCause.STORAGE)
    return back_to(spec, state, slots, newest, cause)


def _usable(state: JobState, latest: CheckpointLatest) -> tuple[CheckpointRef, ...]:
    """Checkpoints to go back to, newest first: of the job's own history, and not damaged.

    Those that a restoration left behind are not in the history. If the checkpoint that the timeline began with is not kept any
    more, all that are kept count: it was deleted as the timeline began.
    """
    mine = history(latest.kept, state.timeline, state.checkpoint) or latest.kept
    return tuple(ref for ref in mine if ref.uuid not in state.damaged)


def back_to(
    spec: JobSpec, state: JobState, slots: SlotMap | None, ref: CheckpointRef, cause: str, *, asked: bool = False
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


def fresh_map(spec: JobSpec, before: SlotMap | None) -> SlotMap:
    """All slots spread over as many parameter servers as the job wants. `before`: the map in force, if there is one."""
    version = before.version + 1 if before is not None else 1
    return SlotMap(version=version, owners=spread(spec.slot_count, spec.pservers))


def stage_at(spec: JobSpec, stage: Stage, epoch: int) -> Stage:
    """TRAIN if any training is left; else the stage stays, and what follows training is not undone."""
    if epoch < spec.epochs:
        return Stage.TRAIN
    return next_stage(spec, stage) if stage is Stage.TRAIN else stage


def resume(job: Job, epoch: int, step: int, *, records: int, seconds: float) -> Decision[bool]:
    """RUNNING again with the trainers that are there (collective: those that have the parameters), if all pservers have the parameters.
    Answers whether it is.

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
    changes: tuple[Change, ...] = (new_list(spec, job.trainers, generation, trainers, job.speeds.lane_s), running)
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
