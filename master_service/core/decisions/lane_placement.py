"""Which trainer computes which lanes: contiguous intervals that cover [0, lanes) and differ by at most one lane in size.

Few lanes change their owner, as far as that is cheap to find. With more trainers than lanes the last ones are hot spares; a
spare takes the whole interval of an owner that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.records import JobSpec, LaneInterval, LaneMap, Mode

CHEAP_OWNERS = 64


def assign_lanes(lanes: int, before: Sequence[LaneInterval], trainers: Sequence[str]) -> tuple[LaneInterval, ...]:
    """New owners. `trainers` in order of arrival; `before` may name trainers that are gone."""
    return _intervals(lanes, _owners(lanes, before, trainers))


def new_lanes(spec: JobSpec, before: LaneMap | None, generation: int, trainers: Sequence[str]) -> tuple[LaneMap, ...]:
    """The lane map of a new generation. Asynchronous training has none."""
    if spec.mode is not Mode.SYNC:
        return ()
    intervals = assign_lanes(spec.lanes, before.intervals if before else (), trainers)
    return (LaneMap(generation=generation, lanes=spec.lanes, intervals=intervals),)


def moved_lanes(before: Sequence[LaneInterval], after: Sequence[LaneInterval]) -> int:
    """Lanes whose owner in `before` still has lanes in `after`, but not this one."""
    kept = {interval.trainer: interval for interval in after}
    moved = 0
    for old in before:
        new = kept.get(old.trainer)
        if new is not None:
            moved += (old.last - old.first) - max(0, min(old.last, new.last) - max(old.first, new.first))
    return moved


def _owners(lanes: int, before: Sequence[LaneInterval], trainers: Sequence[str]) -> list[str]:
    """The owners in lane order: those before; spares in place of the ones that are gone; newcomers where the fewest lanes move."""
    alive = set(trainers)
    had_lanes = {interval.trainer for interval in before}
    spare = [trainer for trainer in trainers if trainer not in had_lanes]
    owners: list[str] = []
    for interval in before:
        if interval.trainer in alive:
            owners.append(interval.trainer)
        elif spare:
            owners.append(spare.pop(0))
    for newcomer in spare:
        if len(owners) == lanes:
            break
        owners.insert(_cheapest_place(lanes, before, owners, newcomer), newcomer)
    return owners


def _cheapest_place(lanes: int, before: Sequence[LaneInterval], owners: list[str], newcomer: str) -> int:
    if not before or len(owners) > CHEAP_OWNERS:
        return len(owners)

    def cost(place: int) -> tuple[int, int]:
        trial = _intervals(lanes, [*owners[:place], newcomer, *owners[place:]])
        return moved_lanes(before, trial), -place

    return min(range(len(owners) + 1), key=cost)


def _intervals(lanes: int, owners: Sequence[str]) -> tuple[LaneInterval, ...]:
    share, extra = divmod(lanes, len(owners) or 1)
    bounds = [k * share + min(k, extra) for k in range(len(owners) + 1)]
    return tuple(LaneInterval(trainer=t, first=bounds[k], last=bounds[k + 1]) for k, t in enumerate(owners))
