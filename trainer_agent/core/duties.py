"""What a trainer has to do: its duty now, what follows for a synchronous step, and which late lanes it
computes for others.

    job state and trainers from etcd ──next_duty──► WAIT | TRAIN (generation, lanes) | FINISH | LEAVE
    a version's positions ──positions_of_step──► where each lane reads in the step
    the master's request ──checkpoint_asked──► which version becomes a checkpoint on demand
    the records that parameter servers have of one version ──agreed──► one record
    lanes without acknowledgement ──nodes_to_compute──► nodes of the aggregation tree, the largest first
    owners a b c d, lane 5 of b is late ──helper_of──► c in round 0, d in round 1, a in round 2, …; the next
        lane of b one further

All trainers find the same helper without asking anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobState, Mode, Phase, Stage, TrainerList
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition


class Duty(Enum):
    WAIT = "wait"
    TRAIN = "train"
    FINISH = "finish"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Next:
    """`reason`: for people, what is waited for or why it ends. `lanes`: [first, last) to train in
    `generation`."""

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


def helper_of(trainers: TrainerList, lane: int, number: int) -> str | None:
    """The trainer that computes `lane` in round `number` if it is late; None if its owner is the only one
    with lanes.

    The lanes of one owner go to different helpers, so they are computed side by side. A helper that is late
    itself is followed by another one in the next round.
    """
    owners = trainers.owners
    if len(owners) < 2:
        return None
    place = trainers.place_of(lane)
    first, _ = trainers.lanes_of(owners[place])
    return owners[(place + 1 + (lane - first + number) % (len(owners) - 1)) % len(owners)]


def lanes_to_help(trainers: TrainerList, me: str, missing: Iterable[Interval], number: int) -> list[int]:
    """The missing lanes that this trainer computes in round `number`. Never lane 0: its push also says which
    checkpoint is due, and only its owner knows what it has said."""
    return [
        lane
        for first, last in missing
        for lane in range(max(first, 1), min(last, trainers.lanes))
        if helper_of(trainers, lane, number) == me
    ]


def usual_share_s(trainers: TrainerList, me: str, share_s: float) -> float:
    """How long the trainer with the most lanes usually needs, if this one needs `share_s`. Shares by measured
    speed take all trainers the same time."""
    first, last = trainers.lanes_of(me)
    most = -(-trainers.lanes // max(1, trainers.owner_count))
    return share_s if trainers.shares or last == first else share_s * most / (last - first)


def positions_of_step(positions: Sequence[LanePosition]) -> tuple[LanePosition, ...]:
    """Where each lane reads in the step after the version that has `positions`: a new epoch once all lanes
    are exhausted."""
    if ends_epoch(positions):
        return tuple(LanePosition(lane=position.lane, epoch=position.epoch + 1) for position in positions)
    return tuple(positions)


def ends_epoch(positions: Sequence[LanePosition]) -> bool:
    """Whether the version that has these positions is the last one of an epoch."""
    return all(position.exhausted for position in positions)


def checkpoint_asked(
    request: CheckpointRequest | None,
    generation: int,
    step: int,
    carried: CheckpointAsked | None,
    timeline: int = 0,
) -> CheckpointAsked | None:
    """What lane 0's push of `step` says about a checkpoint on demand; `carried`: what the version before
    says, at all parameter servers alike. `timeline`: the generation of the last rollback.

    The checkpoint is due two versions later. All pushes until then come from one owner of lane 0, so every
    parameter server gets the same request. If that owner dies or lane 0 moves before, the generation changes
    and the next owner asks anew. A request that was due in this timeline has been carried to its end: it
    stays on record until the checkpoint is written.
    """
    if request is None:
        return None
    if carried is not None and (carried.operation, carried.attempt) == (request.operation, request.attempt):
        was_due = carried.version <= step and carried.generation >= timeline
        if was_due or carried.generation == generation:
            return carried
    return CheckpointAsked(
        operation=request.operation, attempt=request.attempt, generation=generation, version=step + 2
    )
