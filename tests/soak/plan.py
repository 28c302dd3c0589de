"""Which faults come when: a function of the seed.

The first ones are each kind once, in random order; the rest are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from random import Random

TRAINERS, PSERVERS, STANDBYS = 2, 2, 1
ROLES = {
    "trainer": [f"trainer-{number}" for number in range(TRAINERS)],
    "pserver": [f"pserver-{number}" for number in range(PSERVERS)],
    "master": [f"master-{number}" for number in range(1 + STANDBYS)],
    "etcd": ["etcd"],
}
MAX_PAUSE_S = 1.5


class Kind(StrEnum):
    TRAINER = "trainer"
    PSERVER = "pserver"
    MASTER = "master"
    ETCD = "etcd"
    FREEZE = "freeze"
    TWO = "two at once"
    EVERYTHING = "everything at once"


@dataclass(frozen=True)
class Fault:
    """`after_s`: pause since training went on from the fault before. `victims`: empty means everybody, launcher included."""

    kind: Kind
    victims: tuple[str, ...]
    after_s: float

    def __str__(self) -> str:
        if not self.victims:
            return "SIGKILL everything"
        return f"{'SIGSTOP' if self.kind is Kind.FREEZE else 'SIGKILL'} {' and '.join(self.victims)}"


def plan(seed: int, faults: int) -> list[Fault]:
    return list(islice(_faults(Random(seed)), faults))


def _faults(chance: Random) -> Iterator[Fault]:
    kinds = list(Kind)
    chance.shuffle(kinds)
    while True:
        kind = kinds.pop() if kinds else chance.choice(list(Kind))
        yield Fault(kind, _victims(kind, chance), round(chance.uniform(0, MAX_PAUSE_S), 2))


def _victims(kind: Kind, chance: Random) -> tuple[str, ...]:
    match kind:
        case Kind.EVERYTHING:
            return ()
        case Kind.TWO:
            return tuple(sorted(chance.sample([name for names in ROLES.values() for name in names], 2)))
        case Kind.FREEZE:
            return (chance.choice(ROLES[chance.choice(list(ROLES))]),)
        case role:
            return (chance.choice(ROLES[role]),)
