"""What follows for a synchronous step from the version it starts at.

a version's positions ──positions_of_step──► where each lane reads in the step
the master's request ──checkpoint_asked──► which version becomes a checkpoint on demand
lanes without acknowledgement ──nodes_to_compute──► nodes of the aggregation tree, the largest first
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.lanes import Interval, aligned_intervals
from shared.records.operations import CheckpointRequest
from shared.records.step import CheckpointAsked, LanePosition


def positions_of_step(positions: Sequence[LanePosition]) -> tuple[LanePosition, ...]:
    """Where each lane reads in the step after the version that has `positions`: a new epoch once all lanes are exhausted."""
    if all(position.exhausted for position in positions):
        return tuple(LanePosition(lane=position.lane, epoch=position.epoch + 1) for position in positions)
    return tuple(positions)


def checkpoint_asked(
    request: CheckpointRequest | None, generation: int, step: int, carried: CheckpointAsked | None
) -> CheckpointAsked | None:
    """What lane 0's push of `step` says about a checkpoint on demand; `carried`: what the version before says.

    The checkpoint is due two versions later. All pushes until then come from one owner of lane 0, so every parameter
    server gets the same request. If that owner dies or lane 0 moves, the generation changes and the next owner asks anew.
    """
    if request is None:
        return None
    asked = CheckpointAsked(
        operation=request.operation, attempt=request.attempt, generation=generation, version=step + 2
    )
    same = carried is not None and carried.model_copy(update={"version": asked.version}) == asked
    return carried if same else asked


def nodes_to_compute(missing: Sequence[int]) -> list[Interval]:
    """The tree nodes that cover the `missing` lanes (ascending). The largest first: it needs the fewest gradient vectors."""
    nodes: list[Interval] = []
    start = 0
    for end in range(1, len(missing) + 1):
        if end == len(missing) or missing[end] != missing[end - 1] + 1:
            nodes += aligned_intervals(missing[start], missing[end - 1] + 1)
            start = end
    return sorted(nodes, key=lambda node: (node[0] - node[1], node[0]))
