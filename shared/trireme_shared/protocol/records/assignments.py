"""Which trainers train in a generation, which lanes each computes, which parameter server holds which slots,
and which slots move.

A group of slots moves from one parameter server (source) to another (target). The slot map in etcd says who
owns it, and changes once the target has everything. `spread` gives the owners of a new job's slots,
`rebalanced` those of other numbers of parameter servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate

from trireme_shared.protocol.lanes import Interval, place_of, share_of
from trireme_shared.protocol.records.record import Message, Record

Runs = tuple[tuple[int, int], ...]
"""Shares of trainers in their order, run by run: (lanes, how many trainers one after the other have so
many)."""


class TrainersChange(Record):
    """How the trainers of `generation` follow from those of generation `before` (0: from none): those in
    `left` are taken out, then each of `joined` is put in at its place, in order. `shares`: of the list after
    it. Members follow it: it is short where the list is long."""

    generation: int
    before: int = 0
    lanes: int = 0
    left: tuple[str, ...] = ()
    joined: tuple[tuple[int, str], ...] = ()
    shares: Runs = ()


class TrainerList(Record):
    """The trainers from `generation` on, until another list follows: the owners of lanes in the order of
    their lanes, then the hot spares. Each of n owners has 1/n of the `lanes`, the first ones one more if that
    leaves a rest; `shares` (if any) says otherwise, and whoever is behind its end is a spare. Asynchronous:
    no lanes, in order of arrival."""

    generation: int = 0
    lanes: int = 0
    names: tuple[str, ...] = ()
    shares: Runs = ()

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def __contains__(self, trainer: str) -> bool:
        return trainer in self.places

    def lanes_of(self, trainer: str) -> Interval:
        """[first, last) of a trainer; (0, 0) for a hot spare."""
        place = self.places.get(trainer, len(self.names))
        if place >= self.owner_count:
            return 0, 0
        if self.shares:
            return self._ends[place - 1] if place else 0, self._ends[place]
        return share_of(self.lanes, self.owner_count, place)

    @property
    def most_lanes(self) -> int:
        """How many lanes the trainer with the most has; 0 if nobody has any."""
        if self.shares:
            return max(lanes for lanes, _ in self.shares)
        return -(-self.lanes // self.owner_count) if self.owner_count else 0

    def place_of(self, lane: int) -> int:
        """The place of the owner of `lane`."""
        return bisect_right(self._ends, lane) if self.shares else place_of(self.lanes, self.owner_count, lane)

    @property
    def owner_count(self) -> int:
        """How many trainers have lanes: the first ones of `names`."""
        return len(self._ends) if self.shares else min(self.lanes, len(self.names))

    @property
    def owners(self) -> tuple[str, ...]:
        """The trainers that have lanes, in the order of their lanes."""
        return self.names[: self.owner_count]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The end of each owner's lanes, if there are `shares`."""
        return tuple(accumulate(lanes for lanes, trainers in self.shares for _ in range(trainers)))

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
            return TrainersChange(
                generation=after.generation, lanes=after.lanes, joined=tuple(joined), shares=after.shares
            )
        left = tuple(name for name in self.names if name not in common or name in moved)
        return TrainersChange(
            generation=after.generation,
            before=self.generation,
            lanes=after.lanes,
            left=left,
            joined=tuple(joined),
            shares=after.shares,
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
        return TrainerList(
            generation=change.generation, lanes=change.lanes, names=tuple(names), shares=change.shares
        )


class SlotMap(Record):
    """`owners[slot]` is a pserver index. `pservers`: how many parameter servers the job wants since this map
    was written; 0: as many as have slots. While a resize moves slots, some of them have none yet, or others
    have some left."""

    version: int
    owners: tuple[int, ...]
    pservers: int = 0

    @cached_property
    def wanted(self) -> int:
        """How many parameter servers the map is made for."""
        return self.pservers or max(self.owners) + 1

    @cached_property
    def serving(self) -> tuple[int, ...]:
        """Indices of the parameter servers that have slots, in order."""
        return tuple(sorted(set(self.owners)))


class Group(Record):
    """Slots that move together from pserver `source` to pserver `target`. `bytes`: predicted from the
    layout."""

    number: int
    source: int
    target: int
    slots: tuple[int, ...]
    bytes: int = 0


class Migration(Record):
    """`job/migration`: what parameter servers hand over to each other. `id` names the resize and its attempt:
    nothing that was handed over for another one counts. `members`: index -> incarnation of all sources and
    targets."""

    id: str
    timeline: int
    groups: tuple[Group, ...]
    members: dict[str, str]


class Handed(Record):
    """In `ps/<index>` of a source. `groups`: numbers of those whose target has everything. `forgotten`: how
    many of them it has forgotten since, because the slot map gave them to their targets. `failed`: why it
    cannot hand over."""

    migration: str
    groups: tuple[int, ...] = ()
    forgotten: int = 0
    bytes: int = 0
    longest_pause_s: float = 0.0
    failed: Message = ""


class GivenNumbers(Record):
    """`job/given`: the numbers of members in the spec that masters are started with, once a resize has
    changed those in `job/spec`. A master that is started with other numbers than these resizes the job as
    before: at its start."""

    trainers: int
    pservers: int


def slot_of(block: int, slot_count: int) -> int:
    """Block numbers are dense, so the remainder spreads them evenly; no hash does better."""
    return block % slot_count


def spread(slot_count: int, pservers: int) -> tuple[int, ...]:
    """The owners in a first slot map: round robin, so that neighbouring blocks go to different pservers."""
    return tuple(slot % pservers for slot in range(slot_count))


def rebalanced(owners: Sequence[int], weights: Sequence[int], pservers: int) -> tuple[int, ...]:
    """The owners for `pservers` parameter servers, 0 to `pservers` - 1. Slots of others move to who has
    least; then a slot moves only while that makes a load more even. `weights[slot]`: its bytes; a slot of 0
    moves only if its owner leaves."""
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
        # the lightest first; all blocks but few are as large
        held[index].sort(key=lambda slot: (weights[slot], -slot))
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
