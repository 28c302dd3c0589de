"""The gradient of a step's rows: over the lanes the canonical tree of weighted means
(shared/trireme_shared/protocol/lanes.py), a lane without an id counting as zero.

sums of each lane's minibatch, by ids that ascend --> all ids of the step, and the mean gradient of each
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from trireme_shared.tables.grouping import Grouped, grouped
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.memory import Floats, Numbers, portions, rows_at_once

NO_IDS = np.empty(0, np.int64)
MERGED_AT_ONCE = 1 << 18  # ids: about a millisecond
Mean = tuple[Numbers, Floats | None]


@dataclass(slots=True)
class LaneRows:
    """Of one lane and table. `ids`: int64 (n,), ascending, each once. `gradients`: float32 (n, dim): the sum
    over each id's occurrences in the minibatch. `count`: records of the minibatch; 0: the lane has no data in
    this step."""

    ids: Numbers
    gradients: Floats
    count: int


def sums_of_ids(ids: Numbers, gradients: Floats) -> tuple[Numbers, Floats]:
    """The ids, ascending, each once, and the sums of their gradients. `ids`: int64 (n,); `gradients`: float32
    (n, dim). Those of an id are added in the order in which torch coalesces sparse gradients."""
    found = grouped(ids)
    return found.ids, sums_of(found, gradients)


def sums_of(occurrences: Grouped, gradients: Floats) -> Floats:
    """The sums of the gradients of each id: float32 (k, dim). `gradients`: of each occurrence, float32 (n,
    dim), contiguous."""
    sums = np.empty((len(occurrences.ids), gradients.shape[1]), np.float32)
    row_loops.segment_sums(occurrences.order, occurrences.starts, gradients, sums)
    return sums


def mean_over_lanes(lanes: Sequence[LaneRows], dim: int) -> Mean:
    """The ids of all lanes, ascending, and their gradients. `lanes`: all of the step, in order; their number
    is a power of two. None: no lane has data."""
    steps = means_over_lanes(lanes, dim)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            mean: Mean = end.value
            return mean


def means_over_lanes(lanes: Sequence[LaneRows], dim: int) -> Generator[None, None, Mean]:
    """`mean_over_lanes`, with some milliseconds of work between two values."""
    filled = [lane for lane in lanes if lane.count]
    if not filled:
        return NO_IDS, None
    if len(filled) == 1:  # an empty side leaves the other as it is
        return filled[0].ids, filled[0].gradients
    ids = yield from _merged([lane.ids for lane in filled])
    mean = np.empty((len(ids), dim), np.float32)
    depth, firsts = len(lanes).bit_length(), [0] * len(lanes)
    for portion in portions(len(ids), rows_at_once(dim * depth)):
        some = ids[portion]
        nodes, counts, waiting = np.empty((depth, len(some), dim), np.float32), np.zeros(depth, np.int64), 0
        places = np.empty(len(some), np.int64)
        for number, lane in enumerate(lanes):
            own = lane.ids if lane.count else NO_IDS
            firsts[number] = row_loops.places_among(own, firsts[number], some, places)
            waiting = row_loops.add_into_tree(places, lane.gradients, lane.count, waiting, nodes, counts)
        mean[portion] = nodes[depth - 1]
        yield
    return ids, mean


def mean_over_minibatches(minibatches: Sequence[Sequence[LaneRows]], dims: Sequence[int]) -> list[LaneRows]:
    """Of each table, as if they were one minibatch: the mean by numbers of records, in the order of the tree.
    `minibatches`: at least one; of each all tables."""
    if len(minibatches) == 1:
        return list(minibatches[0])
    width, found = 1 << (len(minibatches) - 1).bit_length(), []
    for table, dim in enumerate(dims):
        lanes = [each[table] for each in minibatches]
        nothing = LaneRows(NO_IDS, np.empty((0, dim), np.float32), 0)
        ids, mean = mean_over_lanes([*lanes, *[nothing] * (width - len(lanes))], dim)
        found.append(
            LaneRows(ids, nothing.gradients if mean is None else mean, sum(lane.count for lane in lanes))
        )
    return found


def _merged(sides: list[Numbers]) -> Generator[None, None, Numbers]:
    """The union of arrays that ascend, each id once; pairs of them are merged, then pairs of these."""
    while len(sides) > 1:
        pairs, last = zip(sides[::2], sides[1::2], strict=False), sides[len(sides) & ~1 :]
        sides = []
        for left, right in pairs:
            out, at = np.empty(len(left) + len(right), np.int64), (0, 0, 0)
            while at[:2] != (len(left), len(right)):
                at = row_loops.merge(left, right, *at[:2], out, at[2], MERGED_AT_ONCE)
                yield
            sides.append(out[: at[2]])
        sides += last
    return sides[0]
