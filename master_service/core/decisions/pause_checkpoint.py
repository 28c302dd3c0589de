"""The checkpoint of an asynchronous job is taken in a pause: training stops for as long as a copy in memory takes.

RUNNING --begin--> CHECKPOINTING, trainers/pause --all paused: cut--> generation + 1 --all copied: finish--> RUNNING
   ^                   |                                  |
   +----- give up -----+---- a member is too slow, gone ---+          files are written in the background

The checkpoint holds the task queue at the revision of the cut. The cut counts only once `finish` has confirmed it.
"""

from __future__ import annotations

from master_service.core.changes import Decision, DropCut, DropPause, Event, Fields, PutCut, PutPause
from master_service.core.decisions.rollback import has_parameters, slots_fit
from master_service.core.state.job import Job
from master_service.core.state.members import Members
from shared.records import JobSpec, JobState, Mode, Phase
from shared.records.checkpoints import CheckpointCut
from shared.records.pauses import Pause, Saving


def is_paused_kind(spec: JobSpec) -> bool:
    """Whether this job's checkpoints are taken in pauses."""
    return spec.mode is Mode.ASYNC and spec.checkpoint_kind == "coordinated"


def can_begin(job: Job) -> bool:
    whole = job.slots is not None and slots_fit(job.slots, job.spec) and not _missing(job.spec, job.state, job.members)
    return job.state.phase is Phase.RUNNING and job.members.init_done and whole


def begin(job: Job, uuid: str, lease: int, cause: str) -> Decision[Saving | None]:
    """Ask all trainers to pause, if the job runs and all parameters are there. `uuid`: of checkpoint number `saved` + 1."""
    if not can_begin(job):
        return Decision(None)
    state = job.state
    asked = job.operations.making()
    saving = Saving(uuid=uuid, step=state.saved + 1, operation=asked[0].operation_id if asked else "")
    reason = f"checkpoint {saving.step} is taken: {cause}"
    update = {"phase": Phase.CHECKPOINTING, "saving": saving, "saved": saving.step, "reason": reason}
    pause = Pause(uuid=uuid, generation=state.generation, reason=cause)
    return Decision(saving, (state.model_copy(update=update), PutPause(pause, lease)))


def still_training(state: JobState, members: Members) -> list[str]:
    """Trainers that have not paused yet. One whose key is gone does not count: its pushes are stale after the cut."""
    uuid = state.saving.uuid if state.saving else ""
    there = [members.trainers[trainer] for trainer in state.trainers if trainer in members.trainers]
    return [member.trainer for member in there if member.paused is None or member.paused.uuid != uuid]


def cut(job: Job) -> Decision[bool]:
    """All trainers have paused: the pservers copy."""
    state, saving = job.state, job.state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None or saving.cut or still_training(state, job.members):
        return Decision(False)
    update = {"saving": saving.model_copy(update={"cut": True}), "generation": state.generation + 1}
    return Decision(True, (state.model_copy(update=update), PutCut(saving.uuid, _cut_of(state, saving))))


def still_copying(state: JobState, members: Members) -> list[int]:
    """Parameter servers that have not copied yet."""
    uuid = state.saving.uuid if state.saving else ""
    return [index for index, member in sorted(members.pservers.items()) if member.copied != uuid]


def finish(job: Job, seconds: float) -> Decision[bool]:
    """All pservers have copied: training continues, and the checkpoint counts as soon as it is written."""
    state, saving = job.state, job.state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None or not saving.cut:
        return Decision(False)
    if still_copying(state, job.members) or _missing(job.spec, state, job.members):
        return Decision(False)
    place = _cut_of(state, saving).model_copy(update={"copied": True})
    reason = f"checkpoint {saving.step} is copied"
    message = f"checkpoint {saving.step}: training stood still for {seconds:.2f} s"
    fields: Fields = {"step": saving.step, "seconds": round(seconds, 3)}
    event = Event("checkpoint_copied", message, {**fields, "checkpoint": saving.uuid})
    return Decision(True, (_running(state, reason), DropPause(), PutCut(saving.uuid, place)), (event,))


def supervise(spec: JobSpec, state: JobState, members: Members) -> Decision[None]:
    """A parameter server that dies during the pause ends it."""
    missing = _missing(spec, state, members)
    if not missing:
        return Decision(None)
    return Decision(None) + give_up(state, f"pserver {missing[0]} is gone")


def give_up(state: JobState, cause: str) -> Decision[bool]:
    """Training continues without this checkpoint. What was written of it never counts."""
    saving = state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None:
        return Decision(False)
    message = f"checkpoint {saving.step} was given up: {cause}"
    event = Event("checkpoint_given_up", message, {"step": saving.step, "cause": cause})
    return Decision(True, (_running(state, message), DropPause(), DropCut(saving.uuid)), (event,))


def _cut_of(state: JobState, saving: Saving) -> CheckpointCut:
    return CheckpointCut(step=saving.step, timeline=state.timeline, trainers=state.trainers, operation=saving.operation)


def _running(state: JobState, reason: str) -> JobState:
    return state.model_copy(update={"phase": Phase.RUNNING, "saving": None, "reason": reason})


def _missing(spec: JobSpec, state: JobState, members: Members) -> list[int]:
    return [index for index in range(spec.pservers) if not has_parameters(state, members, index)]
