"""What a trainer has to do now.

job state and trainers from etcd ──next_duty──► WAIT | TRAIN (generation, lanes) | FINISH | LEAVE
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobState, Mode, Phase, Stage, TrainerList


class Duty(Enum):
    WAIT = "wait"
    TRAIN = "train"
    FINISH = "finish"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Next:
    """`reason`: for people, what is waited for or why it ends. `lanes`: [first, last) to train in `generation`."""

    duty: Duty
    reason: str = ""
    generation: int = 0
    lanes: Interval = (0, 0)


def next_duty(state: JobState | None, trainers: TrainerList, trainer: str, mode: Mode) -> Next:
    """WAIT also for a spare without lanes, and while state and trainers are of different generations."""
    if state is None:
        return Next(Duty.WAIT, "the master to publish the job's state")
    if state.phase.final:
        return Next(Duty.LEAVE, f"the job is {state.phase}")
    if state.phase is not Phase.RUNNING:
        return Next(Duty.WAIT, f"the job to run (it is {state.phase}: {state.reason})")
    if state.stage is not Stage.TRAIN:
        return Next(Duty.FINISH, f"the job is at {state.stage}", state.generation)
    if mode is Mode.ASYNC:
        if trainer in trainers:
            return Next(Duty.TRAIN, "", state.generation)
        return Next(Duty.WAIT, "the master to count this trainer in")
    if trainers.generation != state.generation:
        return Next(Duty.WAIT, f"the lanes of generation {state.generation}")
    mine = trainers.lanes_of(trainer)
    if mine[0] == mine[1]:
        return Next(Duty.WAIT, "a lane (this trainer is a hot spare)", state.generation)
    return Next(Duty.TRAIN, "", state.generation, mine)
