"""What follows for a synchronous step from the version it starts at.

a version's positions ──positions_of_step──► where each lane reads in the step
the master's request ──checkpoint_asked──► which version becomes a checkpoint on demand
the records that parameter servers have of one version ──agreed──► one record
lanes without acknowledgement ──nodes_to_compute──► nodes of the aggregation tree, the largest first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trireme_shared.protocol.lanes import Interval, aligned_intervals
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition, StepRecord


def positions_of_step(positions: Sequence[LanePosition]) -> tuple[LanePosition, ...]:
    """Where each lane reads in the step after the version that has `positions`: a new epoch once all lanes are exhausted."""
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
    """What lane 0's push of `step` says about a checkpoint on demand; `carried`: what the version before says, at all parameter
    servers alike. `timeline`: the generation of the last rollback.

    The checkpoint is due two versions later. All pushes until then come from one owner of lane 0, so every parameter
    server gets the same request. If that owner dies or lane 0 moves before, the generation changes and the next owner asks anew.
    A request that was due in this timeline has been carried to its end: it stays on record until the checkpoint is written.
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


def agreed(records: Iterable[StepRecord | None]) -> StepRecord | None:
    """One of the records that parameter servers have of a version. What it says about a checkpoint on demand is left out unless all
    say the same: in a step in which lane 0 moved, some have it from one owner and some from the next."""
    found = [record for record in records if record is not None]
    if not found:
        return None
    first = found[0]
    if first.lane_zero is None or all(record.asked == first.asked for record in found):
        return first
    return first.with_fields(lane_zero=first.lane_zero.with_fields(asked=None))


def nodes_to_compute(missing: Sequence[int]) -> list[Interval]:
    """The tree nodes that cover the `missing` lanes (ascending). The largest first: it needs the fewest gradient vectors."""
    nodes: list[Interval] = []
    start = 0
    for end in range(1, len(missing) + 1):
        if end == len(missing) or missing[end] != missing[end - 1] + 1:
            nodes += aligned_intervals(missing[start], missing[end - 1] + 1)
            start = end
    return sorted(nodes, key=lambda node: (node[0] - node[1], node[0]))
