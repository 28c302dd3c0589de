"""The phase of a job, and what changes it: no other module gives a job another phase.

WAITING --REGROUP--> RUNNING --PAUSE--> CHECKPOINTING --CONTINUE--> RUNNING
                     RUNNING --GO_BACK--> ROLLING_BACK --RESTORE--> RUNNING
                     RUNNING --COMPLETE--> COMPLETED --TRAIN_LONGER--> WAITING
START_OVER leads to WAITING, FAIL from every phase that is not final to FAILED, and START_AGAIN from there to
WAITING.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum, auto
from typing import TypedDict

from trireme_shared.protocol.records import FailureCause, JobResult, JobState, Phase, Stage, UserFailure
from trireme_shared.protocol.records.job import Saving


class PhaseEvent(StrEnum):
    #: Trainers came or went, and the job trains with those that are there.
    REGROUP = auto()
    #: Fewer trainers have the parameters than min_members (collective).
    FALL_SHORT = auto()
    #: All members load a checkpoint, or drop what they have.
    GO_BACK = auto()
    #: Every member that must has the parameters of the checkpoint.
    RESTORE = auto()
    #: Training starts from the first record with new parameters.
    START_OVER = auto()
    #: Trainers stop, so that the parameter servers can copy a checkpoint (asynchronous).
    PAUSE = auto()
    #: The pause is over.
    CONTINUE = auto()
    COMPLETE = auto()
    FAIL = auto()
    #: The user starts a failed job again.
    START_AGAIN = auto()
    #: The user gives the job more epochs after training was over.
    TRAIN_LONGER = auto()


_NOT_FINAL = tuple(phase for phase in Phase if not phase.final)


def _rows(
    event: PhaseEvent, before: tuple[Phase, ...], after: Phase
) -> dict[tuple[Phase, PhaseEvent], Phase]:
    return {(phase, event): after for phase in before}


TRANSITIONS: Mapping[tuple[Phase, PhaseEvent], Phase] = {
    **_rows(PhaseEvent.REGROUP, (Phase.WAITING, Phase.RUNNING), Phase.RUNNING),
    **_rows(PhaseEvent.FALL_SHORT, (Phase.RUNNING,), Phase.WAITING),
    **_rows(PhaseEvent.GO_BACK, (Phase.WAITING, Phase.RUNNING, Phase.ROLLING_BACK), Phase.ROLLING_BACK),
    **_rows(PhaseEvent.RESTORE, (Phase.ROLLING_BACK,), Phase.RUNNING),
    **_rows(PhaseEvent.START_OVER, (Phase.WAITING, Phase.RUNNING, Phase.ROLLING_BACK), Phase.WAITING),
    **_rows(PhaseEvent.PAUSE, (Phase.RUNNING,), Phase.CHECKPOINTING),
    **_rows(PhaseEvent.CONTINUE, (Phase.CHECKPOINTING,), Phase.RUNNING),
    **_rows(PhaseEvent.COMPLETE, _NOT_FINAL, Phase.COMPLETED),  # a trainer may export while others are lost
    **_rows(PhaseEvent.FAIL, _NOT_FINAL, Phase.FAILED),
    **_rows(PhaseEvent.START_AGAIN, (Phase.FAILED,), Phase.WAITING),
    # also of a job that was paused while it evaluated
    **_rows(PhaseEvent.TRAIN_LONGER, tuple(Phase), Phase.WAITING),
}


def after(phase: Phase, event: PhaseEvent) -> Phase:
    """The phase that `event` leads to. Raises RuntimeError if a job in `phase` cannot meet `event`: the
    decision has a bug."""
    found = TRANSITIONS.get((phase, event))
    if found is None:
        possible = ", ".join(before for before, met in TRANSITIONS if met is event)
        raise RuntimeError(f"a job that is {phase} cannot {event}: that is possible in {possible} only")
    return found


class _NoAbsence(TypedDict):
    saving: Saving | None
    absent: tuple[int, ...]
    mended: int
    mends: dict[str, str]
    joined: dict[str, str]


class _NoFailure(TypedDict):
    cause: FailureCause | None
    failure: UserFailure | None
    damaged: tuple[str, ...]
    absent: tuple[int, ...]


def _no_absence() -> _NoAbsence:
    """A timeline that begins has no parameter servers that are gone, were gone, or joined later."""
    return {"saving": None, "absent": (), "mended": 0, "mends": {}, "joined": {}}


def _no_failure() -> _NoFailure:
    """A job that its user starts once more may use every checkpoint, and no member is known to be gone."""
    return {"cause": None, "failure": None, "damaged": (), "absent": ()}


def regrouped(state: JobState, reason: str) -> JobState:
    phase = after(state.phase, PhaseEvent.REGROUP)
    return state.with_fields(phase=phase, generation=state.generation + 1, reason=reason)


def short_of_members(state: JobState, reason: str) -> JobState:
    phase = after(state.phase, PhaseEvent.FALL_SHORT)
    return state.with_fields(phase=phase, generation=state.generation + 1, reason=reason)


def rolling_back(state: JobState, checkpoint: str, reason: str) -> JobState:
    """A timeline begins with the checkpoint of uuid `checkpoint`; "": every member drops its parameters."""
    phase, timeline = after(state.phase, PhaseEvent.GO_BACK), state.generation + 1
    return state.with_fields(
        phase=phase,
        generation=timeline,
        timeline=timeline,
        checkpoint=checkpoint,
        reason=reason,
        **_no_absence(),
    )


def restored(state: JobState, stage: Stage, reason: str) -> JobState:
    phase = after(state.phase, PhaseEvent.RESTORE)
    return state.with_fields(phase=phase, stage=stage, generation=state.generation + 1, reason=reason)


def started_over(state: JobState, reason: str) -> JobState:
    phase, timeline = after(state.phase, PhaseEvent.START_OVER), state.generation + 1
    return state.with_fields(
        phase=phase,
        stage=Stage.TRAIN,
        generation=timeline,
        timeline=timeline,
        checkpoint="",
        reason=reason,
        **_no_absence(),
    )


def checkpointing(state: JobState, saving: Saving, reason: str) -> JobState:
    phase = after(state.phase, PhaseEvent.PAUSE)
    return state.with_fields(phase=phase, saving=saving, saved=saving.step, reason=reason)


def training_continues(state: JobState, generation: int, reason: str) -> JobState:
    """The pause is over. `generation`: a new one if trainers were left out of the pause."""
    phase = after(state.phase, PhaseEvent.CONTINUE)
    return state.with_fields(phase=phase, saving=None, generation=generation, reason=reason)


def completed(state: JobState, result: JobResult) -> JobState:
    phase = after(state.phase, PhaseEvent.COMPLETE)
    return state.with_fields(
        phase=phase, stage=Stage.DONE, reason="trained, evaluated and exported", result=result
    )


def failed(state: JobState, reason: str, cause: FailureCause, failure: UserFailure | None) -> JobState:
    return state.with_fields(
        phase=after(state.phase, PhaseEvent.FAIL), reason=reason, cause=cause, failure=failure
    )


def started_again(state: JobState) -> JobState:
    phase = after(state.phase, PhaseEvent.START_AGAIN)
    return state.with_fields(phase=phase, reason=f"started again after: {state.reason}", **_no_failure())


def trained_longer(state: JobState, reason: str) -> JobState:
    phase = after(state.phase, PhaseEvent.TRAIN_LONGER)
    return state.with_fields(
        phase=phase, stage=Stage.TRAIN, result=JobResult(), reason=reason, **_no_failure()
    )
