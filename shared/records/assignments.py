"""Which trainers train in a generation, which lanes each computes, and which parameter server holds which slots."""

from __future__ import annotations

from functools import cached_property

from shared.lanes import Interval, share_of
from shared.records.record import Record


class TrainersChange(Record):
    """How the trainers of `generation` follow from those of generation `before` (0: from none): those in `left` are taken out, then
    each of `joined` is put in at its place, in order. Members follow it: it is short where the list is long."""

    generation: int
    before: int = 0
    lanes: int = 0
    left: tuple[str, ...] = ()
    joined: tuple[tuple[int, str], ...] = ()


class TrainerList(Record):
    """The trainers from `generation` on, until another list follows: the owners of lanes in the order of their lanes, then the hot
    spares. Each of n owners has 1/n of the `lanes`, the first ones one more if that leaves a rest. Asynchronous: no lanes, in
    order of arrival."""

    generation: int = 0
    lanes: int = 0
    names: tuple[str, ...] = ()

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def __contains__(self, trainer: str) -> bool:
        return trainer in self.places

    def lanes_of(self, trainer: str) -> Interval:
        """[first, last) of a trainer; (0, 0) for a hot spare."""
        place = self.places.get(trainer, self.lanes)
        return share_of(self.lanes, min(self.lanes, len(self.names)), place) if place < self.lanes else (0, 0)

    def change_to(self, after: TrainerList) -> TrainersChange:
        """`changed` by it, this list is `after`."""
        common = self.places.keys() & after.places.keys()
        stays = iter([name for name in self.names if name in common])
        moved: set[str] = set()
        joined, due = [], next(stays, None)
        for place, name in enumerate(after.names):
            while due in moved:
                due = next(stays, None)
            if name == due:
                due = next(stays, None)
                continue
            moved.add(name)
            joined.append((place, name))
        if len(joined) == len(after.names):
            return TrainersChange(generation=after.generation, lanes=after.lanes, joined=tuple(joined))
        left = tuple(name for name in self.names if name not in common or name in moved)
        return TrainersChange(
            generation=after.generation, before=self.generation, lanes=after.lanes, left=left, joined=tuple(joined)
        )

    def changed(self, change: TrainersChange) -> TrainerList | None:
        """The list after `change`; None if the change does not follow this list."""
        if change.generation == self.generation:
            return self
        if change.before not in (0, self.generation):
            return None
        gone = set(change.left)
        names = [name for name in self.names if name not in gone] if change.before else []
        for place, name in change.joined:
            names.insert(place, name)
        return TrainerList(generation=change.generation, lanes=change.lanes, names=tuple(names))


class SlotMap(Record):
    """`owners[slot]` is a pserver index."""

    version: int
    owners: tuple[int, ...]
