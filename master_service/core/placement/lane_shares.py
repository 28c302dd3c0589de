"""How many lanes each trainer gets, by how long a lane takes there. Shares of all lanes, in the order of the trainers.

seconds per lane 1, 1, 1, 5 and 16 lanes ──cut──► 5, 5, 5, 1: a step takes 5 s        evenly: 4, 4, 4, 4: it takes 20 s
──aligned──► ends of shares go to multiples of 2, 4, 8, … where that costs little: fewer nodes are pushed
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from shared.records.assignments import Runs

ALIGNING_COSTS = 1.1
"""So much longer a step may take for shares that are pushed in fewer nodes: a node is as many bytes as the whole model."""


def cut(lanes: int, lane_s: Sequence[float]) -> list[int]:
    """The shares with which the slowest trainer needs the least time. Some may be 0. Among equals the first get more."""
    shares = [0] * len(lane_s)
    finishing = [(seconds, place) for place, seconds in enumerate(lane_s)]
    heapq.heapify(finishing)
    for _ in range(lanes):
        _, place = finishing[0]
        shares[place] += 1
        heapq.heapreplace(finishing, (lane_s[place] * (shares[place] + 1), place))
    return shares


def slowest_s(shares: Sequence[int], lane_s: Sequence[float]) -> float:
    """Seconds that a step takes: of the trainer that needs the longest for its lanes."""
    return max(share * seconds for share, seconds in zip(shares, lane_s, strict=True))


def aligned(shares: Sequence[int], lane_s: Sequence[float]) -> list[int]:
    """About the same shares, with fewer nodes of the tree: each end is moved to the multiple of the highest power of two that lets
    its two neighbours keep at least one lane, and finish in ALIGNING_COSTS times the slowest one's time."""
    limit_s = ALIGNING_COSTS * slowest_s(shares, lane_s)
    ends = [0, *accumulate(shares)]
    for place in range(1, len(shares)):
        before, after = ends[place - 1], ends[place + 1]
        size = 1 << (ends[-1].bit_length() - 1)
        while size > 1:
            near = ends[place] // size * size
            options = sorted((near, near + size), key=lambda end: abs(end - ends[place]))
            fits = [
                end
                for end in options
                if before < end < after
                and (end - before) * lane_s[place - 1] <= limit_s
                and (after - end) * lane_s[place] <= limit_s
            ]
            if fits:
                ends[place] = fits[0]
                break
            size //= 2
    return [last - first for first, last in pairwise(ends)]


def runs_of(shares: Sequence[int]) -> Runs:
    return tuple((share, len(list(run))) for share, run in groupby(shares))
