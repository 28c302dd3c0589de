"""What a trainer does next: decisions of the agent, all inputs as arguments.

what etcd says ──next_duty──► WAIT | TRAIN(generation, lanes) | FINISH | LEAVE
a version's positions ──positions_of_step──► where each lane starts step s
the master's request ──asked_in_step──► which version becomes a checkpoint on demand
lanes without acknowledgement ──nodes_to_compute──► tree nodes, the largest first
an answer to a push ──verdict──► ACKNOWLEDGED | AGAIN | BEHIND | STALE generation | FENCED attempt | BROKEN
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shared.errors import NotReady, StaleAttempt, StaleGeneration, TooEarly, WrongOwner
from shared.lanes import Interval, aligned_intervals
from shared.records import JobState, LaneMap, Mode, Phase, Stage
from shared.records.operations import CheckpointRequest
from shared.records.step import CheckpointAsked, LanePosition
from shared.wire.messages import PushAnswer


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


def next_duty(state: JobState | None, lanes: LaneMap | None, trainer: str, mode: Mode) -> Next:
    """WAIT also for a spare without lanes, and while state and lanes speak of different generations."""
    if state is None:
        return Next(Duty.WAIT, "the master to publish the job's state")
    if state.phase.final:
        return Next(Duty.LEAVE, f"the job is {state.phase}")
    if state.phase is not Phase.RUNNING:
        return Next(Duty.WAIT, f"the job to run (it is {state.phase}: {state.reason})")
    if state.stage is not Stage.TRAIN:
        return Next(Duty.FINISH, f"the job is at {state.stage}", state.generation)
    if mode is Mode.ASYNC:
        if trainer in state.trainers:
            return Next(Duty.TRAIN, "", state.generation)
        return Next(Duty.WAIT, "the master to count this trainer in")
    if lanes is None or lanes.generation != state.generation:
        return Next(Duty.WAIT, f"the lanes of generation {state.generation}")
    mine = lanes.of(trainer)
    if mine[0] == mine[1]:
        return Next(Duty.WAIT, "a lane (this trainer is a hot spare)", state.generation)
    return Next(Duty.TRAIN, "", state.generation, mine)


def positions_of_step(positions: Sequence[LanePosition]) -> tuple[LanePosition, ...]:
    """Where each lane reads in the step after the version that has `positions`: a new epoch once all lanes are exhausted."""
    if all(position.exhausted for position in positions):
        return tuple(LanePosition(lane=position.lane, epoch=position.epoch + 1) for position in positions)
    return tuple(positions)


def asked_in_step(
    request: CheckpointRequest | None, generation: int, step: int, carried: CheckpointAsked | None
) -> CheckpointAsked | None:
    """What lane 0's push of `step` says about a checkpoint on demand; `carried`: what the version it starts from says.

    Due is the version after the next: all pushes that make it come from one owner of lane 0, so every parameter server
    hears the same. If that owner dies or lane 0 moves in between, the generation changes, and the next owner says it anew.
    """
    if request is None:
        return None
    if carried is not None and (carried.operation, carried.attempt, carried.generation) == (
        request.operation,
        request.attempt,
        generation,
    ):
        return carried
    return CheckpointAsked(
        operation=request.operation, attempt=request.attempt, generation=generation, version=step + 2
    )


def nodes_to_compute(missing: Sequence[int]) -> list[Interval]:
    """The tree nodes that cover the `missing` lanes (ascending). The largest first: fewest gradient vectors at a time."""
    nodes: list[Interval] = []
    start = 0
    for end in range(1, len(missing) + 1):
        if end == len(missing) or missing[end] != missing[end - 1] + 1:
            nodes += aligned_intervals(missing[start], missing[end - 1] + 1)
            start = end
    return sorted(nodes, key=lambda node: (node[0] - node[1], node[0]))


class Verdict(Enum):
    """From good to bad. SKIPPED: given up, nobody answered. BEHIND: the ledger expects an earlier minibatch."""

    ACKNOWLEDGED = "acknowledged"
    SKIPPED = "skipped"
    AGAIN = "again"
    BEHIND = "behind"
    STALE = "stale"
    FENCED = "fenced"
    BROKEN = "broken"


_VERDICTS = {
    StaleGeneration.code: Verdict.STALE,
    StaleAttempt.code: Verdict.FENCED,
    TooEarly.code: Verdict.AGAIN,
    NotReady.code: Verdict.AGAIN,
    WrongOwner.code: Verdict.AGAIN,
}


def verdict(answer: PushAnswer, mode: Mode) -> tuple[Verdict, str]:
    """The worst that the answer says about any block, with a sentence."""
    order = list(Verdict)
    worst, sentence = Verdict.ACKNOWLEDGED, ""
    for refusal in answer.refused:
        found = _VERDICTS.get(refusal.code, Verdict.BROKEN)
        if mode is Mode.ASYNC and refusal.code == TooEarly.code:
            found = Verdict.BEHIND
        if order.index(found) > order.index(worst):
            worst = found
            why = refusal.message or f"it is at version {refusal.version}"
            sentence = f"block {refusal.block} refused: {refusal.code}, {why}"
    return worst, sentence
