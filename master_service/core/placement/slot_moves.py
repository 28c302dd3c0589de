"""Which slots move when the number of parameter servers changes, in which groups, and how many bytes that is: from the layout, and from
what parameter servers tell of their rows of embedding tables.

owners, layout --least movement--> slots with another owner --by (source, target)--> groups of some MiB, or of one slot
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.assignments import Group, rebalanced, slot_of
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.operations import MovedBytes

GROUP_BYTES = 32 << 20
LEAST_GROUP_BYTES = 8 << 20
GROUPS = 64
"""A step has to bear the work for one group of each source, and a group takes at least a step. So groups are small as long as a
source has not more than GROUPS of them."""
_STATES = {"Adam": 2, "AdamW": 2, "Adagrad": 1, "RMSprop": 1, "Adadelta": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2}
_MORE = {"amsgrad": 1, "centered": 1, "momentum": 1}


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
    """The groups that move, those of different sources and targets in turn, so that the parameter servers work side by side. `rows_bytes`: by
    parameter server, of its rows of embedding tables."""
    rows, owned = rows_bytes or {}, Counter(slots.owners)
    new, sizes = planned_owners(layout, slots, pservers, sum(rows.values())), slot_bytes(layout, mode)
    sizes = [size + rows.get(owner, 0) // owned[owner] for size, owner in zip(sizes, slots.owners, strict=True)]
    leaving: dict[int, int] = defaultdict(int)
    for slot, (source, target) in enumerate(zip(slots.owners, new, strict=True)):
        leaving[source] += sizes[slot] if source != target else 0
    most = {source: min(GROUP_BYTES, max(LEAST_GROUP_BYTES, size // GROUPS)) for source, size in leaving.items()}
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
        (pair, moving[pair][turn]) for turn in range(rounds) for pair in sorted(moving) if turn < len(moving[pair])
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
        states_of(layout.optimizer, segment.group) if segment.kind == "param" else 0 for segment in layout.segments
    ]
    for block in layout.blocks():
        sizes[slot_of(block.number, layout.slot_count)] += block.bytes * (versions + states[block.segment])
    return sizes


def states_of(optimizer: OptimizerSpec, group: int) -> int:
    """How many tensors of a block's size the optimizer keeps for it."""
    options = {**optimizer.defaults, **optimizer.groups[group]} if group < len(optimizer.groups) else optimizer.defaults
    return _STATES.get(optimizer.name, 0) + sum(count for name, count in _MORE.items() if options.get(name))


def moved_bytes(groups: Sequence[Group]) -> tuple[MovedBytes, ...]:
    """By parameter server."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for group in groups:
        sent[group.source] += group.bytes
        received[group.target] += group.bytes
    indices = sorted(sent.keys() | received.keys())
    return tuple(MovedBytes(pserver=index, sent=sent[index], received=received[index]) for index in indices)
