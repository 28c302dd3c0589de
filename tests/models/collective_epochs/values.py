"""Versions, generations and statements of the model, and what a member sees of its job."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

LANES, BLOCKS, STEPS, RATE, MOMENTUM = 4, 3, 6, 0.05, 0.9
KEPT = 5  # versions of which a member keeps the mean gradients; it needs two
Lane, Record = int, tuple[int, int]
Steps = tuple[tuple[Record, ...], ...]
Means = dict[int, tuple[float, tuple[Record, ...]]]
"""By block: its mean gradient of a step, and the records that it is made of, by lane."""


def noise(record: Record, block: int) -> float:
    lane, place = record
    return ((lane * 7919 + place * 104729 + block * 1299709) % 1000003) / 1000003 - 0.5


def gradient(params: tuple[float, ...], record: Record) -> tuple[float, ...]:
    """Depends on all parameters, so that a mixture of versions shows in the bits."""
    total = sum(params)
    return tuple(
        0.3 * noise(record, k) + 0.1 * (record[0] + 1) * params[k] + 0.01 * total for k in range(BLOCKS)
    )


def tree_sum(of_lane: list[float]) -> float:
    if len(of_lane) == 1:
        return of_lane[0]
    middle = len(of_lane) // 2
    return tree_sum(of_lane[:middle]) + tree_sum(of_lane[middle:])


@dataclass(frozen=True)
class Version:
    """Parameters and optimizer after `number` steps; `steps`: the records of each step, by lane."""

    params: tuple[float, ...] = (0.7, -0.4, 0.1)
    momentum: tuple[float, ...] = (0.0, 0.0, 0.0)
    steps: Steps = ()

    @property
    def number(self) -> int:
        return len(self.steps)

    def next_record(self, lane: Lane, discarded: set[Record]) -> Record:
        place = self.steps[-1][lane][1] + 1 if self.steps else 0
        while (lane, place) in discarded:
            place += 1
        return lane, place

    def stepped(self, means: Means) -> Version:
        momentum = tuple(MOMENTUM * self.momentum[k] + means[k][0] for k in range(BLOCKS))
        params = tuple(self.params[k] - RATE * momentum[k] for k in range(BLOCKS))
        return Version(params, momentum, (*self.steps, means[0][1]))


@cache
def undisturbed(steps: Steps) -> Version:
    """One process, over these records."""
    if not steps:
        return Version()
    before, records = undisturbed(steps[:-1]), steps[-1]
    of_lane = [gradient(before.params, record) for record in records]
    return before.stepped({k: (tree_sum([each[k] for each in of_lane]), records) for k in range(BLOCKS)})


@dataclass(frozen=True)
class Generation:
    """`owners`: members that have lanes; they share the blocks. `since`: by owner, the generation since which
    it has always been one."""

    number: int = 0
    timeline: int = 0
    members: tuple[str, ...] = ()
    lanes_of: dict[str, range] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)

    @property
    def owners(self) -> list[str]:
        return [name for name in self.members if len(self.lanes_of[name])]

    def owner(self, block: int) -> str:
        return self.owners[block % len(self.owners)]

    def without(self, name: str) -> Generation:
        left = tuple(member for member in self.members if member != name)
        return Generation(
            self.number + 1,
            self.timeline,
            left,
            spread(left, [LANES * i // len(left) for i in range(1, len(left))]),
        )


def spread(members: tuple[str, ...], cuts: list[int]) -> dict[str, range]:
    ends = [0, *cuts, LANES]
    return {name: range(ends[i], ends[i + 1]) for i, name in enumerate(members)}


@dataclass(frozen=True)
class Statement:
    """What a member has: its version, the first one whose means it can give, and the records that its last
    versions are made of. `since`: the version that it got whole, so it knows the steps behind that one."""

    has: int
    first: int
    since: int
    made_of: dict[int, tuple[Record, ...]]


class World(Protocol):
    """Of a job, as one member sees it. `faulty`: faults happen. `is_back`: everybody loads the checkpoint."""

    ablation: str
    faulty: bool
    is_back: bool
    generation: Generation
    checkpoint: Version
    discarded: set[Record]

    def holders(self) -> list[str]: ...

    def is_silent(self, name: str) -> bool: ...

    def send(self, to: str, kind: str, sender: Any, *what: Any) -> None: ...

    def answer(self, sender: Any, to: str, kind: str, generation: int, *what: Any) -> None: ...

    def check(self, kept: bool, promise: str) -> None: ...

    def check_bits(self, member: Any) -> None: ...

    def check_versions(self, member: Any) -> None: ...

    def completed(self, member: Any) -> None: ...
