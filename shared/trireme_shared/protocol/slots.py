"""Which slot a block belongs to, which parameter servers hold the slots of a new job, and which slots move when it is resized.

owners, weights --rebalanced--> owners of other parameter servers, least movement --moves--> (slot, source, target)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def slot_of(block: int, slot_count: int) -> int:
    """Block numbers are dense, so the remainder spreads them evenly; no hash does better."""
    return block % slot_count


def spread(slot_count: int, pservers: int) -> tuple[int, ...]:
    """The owners in a first slot map: round robin, so that neighbouring blocks go to different pservers."""
    return tuple(slot % pservers for slot in range(slot_count))


def rebalanced(owners: Sequence[int], weights: Sequence[int], pservers: int) -> tuple[int, ...]:
    """The owners for `pservers` parameter servers, 0 to `pservers` - 1. Slots of others move to who has least; then a slot moves only
    while that makes a load more even. `weights[slot]`: its bytes; a slot of 0 moves only if its owner leaves."""
    new = list(owners)
    loads = [0] * pservers
    held: list[list[int]] = [[] for _ in range(pservers)]
    for slot, owner in enumerate(owners):
        if owner < pservers:
            loads[owner] += weights[slot]
            held[owner].append(slot)

    def give(slot: int, target: int) -> None:
        new[slot] = target
        loads[target] += weights[slot]
        held[target].append(slot)

    homeless = [slot for slot, owner in enumerate(owners) if owner >= pservers]
    for slot in sorted(homeless, key=lambda slot: (-weights[slot], slot)):
        give(slot, min(range(pservers), key=lambda index: (loads[index], len(held[index]), index)))
    for index in range(pservers):
        held[index].sort(key=lambda slot: (weights[slot], -slot))  # the lightest first; all blocks but few are as large
    while True:
        donor = max(range(pservers), key=lambda index: (loads[index], -index))
        target = min(range(pservers), key=lambda index: (loads[index], index))
        gap = loads[donor] - loads[target]
        fitting = next((slot for slot in reversed(held[donor]) if 0 < 2 * weights[slot] <= gap), None)
        if fitting is None:
            return tuple(new)
        held[donor].remove(fitting)
        loads[donor] -= weights[fitting]
        give(fitting, target)


def blocks_in(slots: Collection[int], blocks: int, slot_count: int) -> list[int]:
    """The blocks of these slots, of a layout with so many blocks; in order."""
    return sorted(block for slot in slots for block in range(slot, blocks, slot_count))
