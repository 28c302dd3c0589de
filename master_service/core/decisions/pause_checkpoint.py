"""The checkpoint of an asynchronous job is taken in a pause: training stops for as long as a copy in memory
takes.

RUNNING --begin--> CHECKPOINTING, trainers/pause --all paused, or late: cut--> generation + 1
   ^                                                                  |              |
   +----- give up ------------- a pserver is too slow, or gone -------+              |
   +----- all copied: finish --------------------------------------------------------+
          files are written in the background

A trainer that is late (frozen, or in a long minibatch) is left out of the cut's generation, so its pushes are
stale until the pause is over. What it pushed counts once, by the ledgers. The checkpoint holds the task queue
at the revision of the cut. The cut counts only once `finish` has confirmed it.
"""

from __future__ import annotations

from master_service.core.changes import Change, Decision, DropCut, DropPause, Event, Fields, PutCut, PutPause
from master_service.core.decisions import evaluation
from master_service.core.decisions.recovery import has_parameters
from master_service.core.placement import holders, slots_fit
from master_service.core.state import phases
from master_service.core.state.job import Job, Members
from trireme_shared.protocol.records import JobSpec, JobState, Mode, Phase, SlotMap, TrainerList
from trireme_shared.protocol.records.checkpoints import CheckpointCut
from trireme_shared.protocol.records.job import Pause, Saving


def is_paused_kind(spec: JobSpec) -> bool:
    """Whether this job's checkpoints are taken in pauses."""
    return spec.mode is Mode.ASYNC and spec.checkpoint_kind == "coordinated"


def can_begin(job: Job) -> bool:
    whole = job.slots is not None and slots_fit(job.slots, job.spec) and not _missing(job)
    return job.state.phase is Phase.RUNNING and job.members.init_done and whole


def begin(job: Job, uuid: str, lease: int, cause: str) -> Decision[Saving | None]:
    """Ask all trainers to pause, if the job runs and all parameters are there. `uuid`: of checkpoint number
    `saved` + 1."""
    if not can_begin(job):
        return Decision(None)
    state = job.state
    asked = job.operations.making()
    saving = Saving(uuid=uuid, step=state.saved + 1, operation=asked[0].operation_id if asked else "")
    reason = f"checkpoint {saving.step} is taken: {cause}"
    pause = Pause(uuid=uuid, generation=state.generation, reason=cause)
    return Decision(saving, (phases.checkpointing(state, saving, reason), PutPause(pause, lease)))


def still_training(state: JobState, trainers: TrainerList, members: Members) -> list[str]:
    """Trainers that have not paused yet. One whose key is gone does not count: its pushes are stale after the
    cut."""
    uuid = state.saving.uuid if state.saving else ""
    there = [members.trainers[trainer] for trainer in trainers.names if trainer in members.trainers]
    return [member.trainer for member in there if member.paused is None or member.paused.uuid != uuid]


def cut(job: Job, *, without_late: bool = False) -> Decision[bool]:
    """All trainers have paused: the pservers copy. `without_late`: those that have not paused are left out
    until the pause is over."""
    state, saving = job.state, job.state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None or saving.cut:
        return Decision(False)
    late = tuple(still_training(state, job.trainers, job.members))
    if late and not without_late:
        return Decision(False)
    generation = state.generation + 1
    saving = evaluation.marked(job, saving.with_fields(cut=True, left_out=late))
    cutting = state.with_fields(saving=saving, generation=generation)
    names = tuple(trainer for trainer in job.trainers.names if trainer not in late)
    listed = (TrainerList(generation=generation, names=names),) if late else ()
    message = (
        f"checkpoint {saving.step} is taken without "
        f"{', '.join(late[:4])}{' and others' if len(late) > 4 else ''}: did not pause"
    )
    fields: Fields = {"step": saving.step, "generation": generation, "trainers": len(late)}
    events = (Event("left_out_of_pause", message, fields),) if late else ()
    return Decision(True, (cutting, *listed, PutCut(saving.uuid, _cut_of(cutting, saving, names))), events)


def still_copying(job: Job) -> list[int]:
    """Parameter servers with slots that have not copied yet."""
    uuid = job.state.saving.uuid if job.state.saving else ""
    there = {index: job.members.pservers.get(index) for index in holders(job.spec, job.slots)}
    return [index for index, member in there.items() if member is not None and member.copied != uuid]


def finish(job: Job, seconds: float) -> Decision[bool]:
    """All pservers have copied: training continues, and the checkpoint counts as soon as it is written."""
    state, saving = job.state, job.state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None or not saving.cut:
        return Decision(False)
    if still_copying(job) or _missing(job):
        return Decision(False)
    place = _cut_of(state, saving, job.trainers.names).with_fields(copied=True)
    reason = f"checkpoint {saving.step} is copied"
    message = f"checkpoint {saving.step}: training stood still for {seconds:.2f} s"
    fields: Fields = {"step": saving.step, "seconds": round(seconds, 3)}
    event = Event("checkpoint_copied", message, {**fields, "checkpoint": saving.uuid})
    return Decision(
        True,
        (*_running(state, job.trainers, job.members, reason), DropPause(), PutCut(saving.uuid, place)),
        (event,),
    )


def supervise(
    spec: JobSpec, state: JobState, trainers: TrainerList, slots: SlotMap | None, members: Members
) -> Decision[None]:
    """A parameter server that dies during the pause ends it."""
    missing = [index for index in holders(spec, slots) if not has_parameters(state, members, index)]
    if not missing:
        return Decision(None)
    return Decision(None) + give_up(state, trainers, members, members.absence(f"pserver-{missing[0]}"))


def give_up(state: JobState, trainers: TrainerList, members: Members, cause: str) -> Decision[bool]:
    """Training continues without this checkpoint. What was written of it never counts."""
    saving = state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None:
        return Decision(False)
    message = f"checkpoint {saving.step} was given up: {cause}"
    event = Event("checkpoint_given_up", message, {"step": saving.step, "cause": cause})
    return Decision(
        True, (*_running(state, trainers, members, message), DropPause(), DropCut(saving.uuid)), (event,)
    )


def _cut_of(state: JobState, saving: Saving, trainers: tuple[str, ...]) -> CheckpointCut:
    return CheckpointCut(
        step=saving.step,
        timeline=state.timeline,
        trainers=trainers,
        operation=saving.operation,
        evaluation=saving.evaluation,
        minibatches=saving.minibatches,
    )


def _running(state: JobState, trainers: TrainerList, members: Members, reason: str) -> tuple[Change, ...]:
    """With the trainers that were left out, if they are still there."""
    left_out = state.saving.left_out if state.saving else ()
    back = tuple(trainer for trainer in left_out if trainer in members.trainers)
    generation = state.generation + bool(back)
    listed = (TrainerList(generation=generation, names=(*trainers.names, *back)),) if back else ()
    return phases.training_continues(state, generation, reason), *listed


def _missing(job: Job) -> list[int]:
    return [
        index for index in holders(job.spec, job.slots) if not has_parameters(job.state, job.members, index)
    ]
