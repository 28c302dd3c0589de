"""Which trainer computes which lanes: the owners share all lanes evenly, in the order of the list.

Few lanes change their owner, as far as that is cheap to find. With more trainers than lanes the last ones are hot spares; a
spare takes the place of an owner that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.lanes import share_of
from shared.records import JobSpec, Mode, TrainerList

CHEAP_OWNERS = 64


def new_list(spec: JobSpec, before: TrainerList, generation: int, trainers: Sequence[str]) -> TrainerList:
    """The list of a new generation. `trainers` in order of arrival; `before` may name trainers that are gone."""
    if spec.mode is not Mode.SYNC:
        return TrainerList(generation=generation, names=tuple(trainers))
    return TrainerList(generation=generation, lanes=spec.lanes, names=place(spec.lanes, before.names, trainers))


def place(lanes: int, before: Sequence[str], trainers: Sequence[str]) -> tuple[str, ...]:
    """Owners in the order of their lanes: those before, spares in place of the ones that are gone, newcomers where the fewest lanes
    move; then the spares that are left."""
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


def _cheapest_place(lanes: int, before: Sequence[str], owners: list[str], newcomer: str) -> int:
    if not before or len(owners) > CHEAP_OWNERS:
        return len(owners)

    def cost(place: int) -> tuple[int, int]:
        return moved_lanes(lanes, before, [*owners[:place], newcomer, *owners[place:]]), -place

    return min(range(len(owners) + 1), key=cost)
