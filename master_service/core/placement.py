"""Which trainer computes which lanes, and which slots move when the number of parameter servers changes.

Owners share all lanes evenly, in the order of the list, or by their measured speed. Few lanes change their
owner, as far as that is cheap to find. With more trainers than lanes the last ones are hot spares; a spare
takes the place of an owner that is gone, or that is so slow that it gets no lane.

Slots: owners, layout --least movement--> slots with another owner
    --by (source, target)--> groups of some MiB, or of one slot

The layout, and what parameter servers tell of their rows of embedding tables, say how many bytes that is.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from statistics import median

from trireme_shared.protocol.lanes import share_of
from trireme_shared.protocol.records import (
    JobSpec,
    Mode,
    SlotMap,
    Strategy,
    TrainerList,
)
from trireme_shared.protocol.records.assignments import Group, Runs, rebalanced, slot_of, spread
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.operations import MovedBytes

CHEAP_OWNERS = 64
WORTH_MOVING = 1.2
"""Lanes move only if steps get faster by this factor: measured speeds vary, and whoever gets a lane reads its
task again."""
FORGOTTEN_AFTER = 10
"""Times `rebalance_s`: who has had no lane for so long is not known to be slow any more, and is tried
again."""

LaneSeconds = Mapping[str, float]
ALIGNING_COSTS = 1.1
"""So much longer a step may take for shares that are pushed in fewer nodes: a node is as many bytes as the
whole model."""
GROUP_BYTES = 32 << 20
LEAST_GROUP_BYTES = 8 << 20
GROUPS = 64
"""A step has to bear the work for one group of each source, and a group takes at least a step. So groups are
small as long as a source has not more than GROUPS of them."""
_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
}
_MORE = {"amsgrad": 1, "centered": 1, "momentum": 1}


def new_list(
    spec: JobSpec,
    before: TrainerList,
    generation: int,
    trainers: Sequence[str],
    lane_s: LaneSeconds | None = None,
) -> TrainerList:
    """The list of a new generation. `trainers` in order of arrival; `before` may name trainers that are gone.
    `lane_s`: what is known of their seconds per lane."""
    if spec.mode is not Mode.SYNC:
        return TrainerList(generation=generation, names=tuple(trainers))
    names = place(spec.lanes, before.owners, trainers)
    even = TrainerList(generation=generation, lanes=spec.lanes, names=names)
    expected = expected_s(names, lane_s or {})
    if spec.stragglers == "off" or not expected:
        return even
    shares = cut(spec.lanes, [expected[name] for name in names])
    if step_s(even, expected) <= WORTH_MOVING * slowest_s(shares, [expected[name] for name in names]):
        return even
    working = place(
        spec.lanes, before.owners, [name for name, share in zip(names, shares, strict=True) if share]
    )
    if expected[working[0]] > spec.straggler_factor * median(expected.values()):
        # nobody else computes lane 0 when it is late (trainer_agent/core/duties.py)
        working = *working[1:], working[0]
    share_by_name = dict(zip(names, shares, strict=True))
    fitted = aligned([share_by_name[name] for name in working], [expected[name] for name in working])
    idle = [name for name in names if name not in set(working)]
    return TrainerList(
        generation=generation, lanes=spec.lanes, names=(*working, *idle), shares=runs_of(fitted)
    )


def step_s(listed: TrainerList, lane_s: LaneSeconds) -> float:
    """How long the slowest trainer of the list needs for its lanes."""
    lanes = [listed.lanes_of(name) for name in listed.owners]
    return max(
        (last - first) * lane_s[name] for name, (first, last) in zip(listed.owners, lanes, strict=True)
    )


def place(lanes: int, before: Sequence[str], trainers: Sequence[str]) -> tuple[str, ...]:
    """Owners in the order of their lanes: those before, spares in place of the ones that are gone, newcomers
    where the fewest lanes move; then the spares that are left."""
    alive, owned = set(trainers), before[:lanes]
    owning = set(owned)
    spare = [trainer for trainer in trainers if trainer not in owning]
    taken = 0
    owners: list[str] = []
    for owner in owned:
        if owner in alive:
            owners.append(owner)
        elif taken < len(spare):
            owners.append(spare[taken])
            taken += 1
    for newcomer in spare[taken:]:
        if len(owners) == lanes:
            break
        owners.insert(_cheapest_place(lanes, owned, owners, newcomer), newcomer)
        taken += 1
    return *owners, *spare[taken:]


def moved_lanes(lanes: int, before: Sequence[str], after: Sequence[str]) -> int:
    """Lanes whose owner in `before` still has lanes in `after`, but not this one."""
    kept = {owner: share_of(lanes, len(after), number) for number, owner in enumerate(after)}
    moved = 0
    for number, owner in enumerate(before):
        if owner in kept:
            (first, last), (new_first, new_last) = share_of(lanes, len(before), number), kept[owner]
            moved += (last - first) - max(0, min(last, new_last) - max(first, new_first))
    return moved


def expected_s(names: Sequence[str], lane_s: LaneSeconds) -> dict[str, float]:
    """Seconds per lane of each; who is not measured is taken to be like the others. Empty if nobody is
    measured."""
    known = [lane_s[name] for name in names if name in lane_s]
    usual = median(known) if known else 0.0
    return {name: lane_s.get(name, usual) for name in names} if known else {}


def _cheapest_place(lanes: int, before: Sequence[str], owners: list[str], newcomer: str) -> int:
    if not before or len(owners) > CHEAP_OWNERS:
        return len(owners)

    def cost(place: int) -> tuple[int, int]:
        return moved_lanes(lanes, before, [*owners[:place], newcomer, *owners[place:]]), -place

    return min(range(len(owners) + 1), key=cost)


def cut(lanes: int, lane_s: Sequence[float]) -> list[int]:
    """The shares with which the slowest trainer needs the least time. Some may be 0. Among equals the first
    get more."""
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
    """About the same shares, with fewer nodes of the tree: each end is moved to the multiple of the highest
    power of two that lets its two neighbours keep at least one lane, and finish in ALIGNING_COSTS times the
    slowest one's time."""
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


# -------------------------------------------------------------------- which slots move


def planned_owners(layout: Layout, slots: SlotMap, pservers: int, rows_bytes: int = 0) -> tuple[int, ...]:
    """The owners after the resize. `rows_bytes`: of the rows of embedding tables of all slots."""
    weights = [0] * len(slots.owners)
    for block in layout.blocks():
        weights[slot_of(block.number, layout.slot_count)] += block.bytes
    if layout.tables:  # all slots have about as many rows, however few blocks there are
        rows = max(layout.block_bytes, rows_bytes // len(weights))
        weights = [weight + rows for weight in weights]
    return rebalanced(slots.owners, weights, pservers)


def planned_groups(
    layout: Layout, mode: Mode, slots: SlotMap, pservers: int, rows_bytes: Mapping[int, int] | None = None
) -> tuple[Group, ...]:
    """The groups that move, those of different sources and targets in turn, so that the parameter servers
    work side by side. `rows_bytes`: by parameter server, of its rows of embedding tables."""
    rows, owned = rows_bytes or {}, Counter(slots.owners)
    new, sizes = planned_owners(layout, slots, pservers, sum(rows.values())), slot_bytes(layout, mode)
    sizes = [
        size + rows.get(owner, 0) // owned[owner] for size, owner in zip(sizes, slots.owners, strict=True)
    ]
    leaving: dict[int, int] = defaultdict(int)
    for slot, (source, target) in enumerate(zip(slots.owners, new, strict=True)):
        leaving[source] += sizes[slot] if source != target else 0
    most = {
        source: min(GROUP_BYTES, max(LEAST_GROUP_BYTES, size // GROUPS)) for source, size in leaving.items()
    }
    moving: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for slot, (source, target) in enumerate(zip(slots.owners, new, strict=True)):
        if source == target:
            continue
        groups = moving[source, target]
        if groups and groups[-1][1] + sizes[slot] <= most[source]:
            members, size = groups.pop()
            groups.append(((*members, slot), size + sizes[slot]))
        else:
            groups.append(((slot,), sizes[slot]))
    rounds = max((len(groups) for groups in moving.values()), default=0)
    ordered = [
        (pair, moving[pair][turn])
        for turn in range(rounds)
        for pair in sorted(moving)
        if turn < len(moving[pair])
    ]
    return tuple(
        Group(number=number, source=source, target=target, slots=members, bytes=size)
        for number, ((source, target), (members, size)) in enumerate(ordered)
    )


def slot_bytes(layout: Layout, mode: Mode) -> list[int]:
    """Of each slot when it moves: values (synchronous: of two versions) and the optimizer's state."""
    sizes = [0] * layout.slot_count
    versions = 2 if mode is Mode.SYNC else 1
    states = [
        states_of(layout.optimizer, segment.group) if segment.kind == "param" else 0
        for segment in layout.segments
    ]
    for block in layout.blocks():
        sizes[slot_of(block.number, layout.slot_count)] += block.bytes * (versions + states[block.segment])
    return sizes


def states_of(optimizer: OptimizerSpec, group: int) -> int:
    """How many tensors of a block's size the optimizer keeps for it."""
    options = (
        {**optimizer.defaults, **optimizer.groups[group]}
        if group < len(optimizer.groups)
        else optimizer.defaults
    )
    return _STATES.get(optimizer.class_of(group), 0) + sum(
        count for name, count in _MORE.items() if options.get(name)
    )


def moved_bytes(groups: Sequence[Group]) -> tuple[MovedBytes, ...]:
    """By parameter server."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for group in groups:
        sent[group.source] += group.bytes
        received[group.target] += group.bytes
    indices = sorted(sent.keys() | received.keys())
    return tuple(MovedBytes(pserver=index, sent=sent[index], received=received[index]) for index in indices)


def holders(spec: JobSpec, slots: SlotMap | None) -> tuple[int, ...]:
    """The parameter servers that the job needs: those that have slots. While a resize moves slots, others
    come or go beside them."""
    if spec.strategy is Strategy.COLLECTIVE:
        return ()  # a slot map may be left of a run with parameter servers
    return slots.serving if slots is not None else tuple(range(spec.pservers))


def slots_fit(slots: SlotMap, spec: JobSpec) -> bool:
    return slots.wanted == spec.pservers


def fresh_map(spec: JobSpec, before: SlotMap | None) -> SlotMap:
    """All slots spread over as many parameter servers as the job wants. `before`: the map in force, if there
    is one."""
    version = before.version + 1 if before is not None else 1
    return SlotMap(version=version, owners=spread(spec.slot_count, spec.pservers))
