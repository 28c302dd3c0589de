"""Which faults come when: a function of the seed and the kinds.

The first ones are each kind once, in random order; the rest are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from random import Random

from trireme.cli.doctor import MASTER_TTL_S

TRAINERS, PSERVERS, STANDBYS = 2, 2, 1
LEASE_S = 2.0
ROLES = {
    "trainer": [f"trainer-{number}" for number in range(TRAINERS)],
    "pserver": [f"pserver-{number}" for number in range(PSERVERS)],
    "master": [f"master-{number}" for number in range(1 + STANDBYS)],
    "etcd": ["etcd"],
}
MEMBERS = ("trainer", "pserver", "master")
MAX_PAUSE_S = 1.0


class Kind(StrEnum):
    """kill: SIGKILL. freeze: SIGSTOP, later SIGCONT; a short one is over before the lease, a long one after it. cut: all packets to
    and from the ports are dropped; lossy: `LOSS` of them. full: no byte can be written below the folder."""

    KILL_TRAINER = "kill-trainer"
    KILL_PSERVER = "kill-pserver"
    KILL_MASTER = "kill-master"
    KILL_ETCD = "kill-etcd"
    KILL_TWO = "kill-two"
    KILL_EVERYTHING = "kill-everything"
    FREEZE_SHORT = "freeze-short"
    FREEZE_LONG = "freeze-long"
    FREEZE_ETCD = "freeze-etcd"
    CUT_ETCD = "cut-etcd"
    LOSSY_ETCD = "lossy-etcd"
    CUT_PSERVERS = "cut-pservers"
    LOSSY_PSERVERS = "lossy-pservers"
    FULL_DATA = "full-data"
    FULL_CHECKPOINTS = "full-checkpoints"


PACKETS = frozenset({Kind.CUT_ETCD, Kind.LOSSY_ETCD, Kind.CUT_PSERVERS, Kind.LOSSY_PSERVERS})
DISKS = frozenset({Kind.FULL_DATA, Kind.FULL_CHECKPOINTS})
ANYWHERE = tuple(kind for kind in Kind if kind not in PACKETS | DISKS)
LOSS = 0.3
ETCD_SILENT_S = (2.0, 6.0, 10.0)


@dataclass(frozen=True)
class Fault:
    """`after_s`: pause since training went on from the fault before. `victims`: processes that get the signal. `seconds`: how long it
    lasts; 0 for a kill."""

    kind: Kind
    victims: tuple[str, ...]
    seconds: float
    after_s: float

    def __str__(self) -> str:
        what = " ".join((self.kind, *([" and ".join(self.victims)] if self.victims else [])))
        return f"{what} for {self.seconds:g} s" if self.seconds else what


def plan(seed: int, faults: int, kinds: Sequence[Kind] = ANYWHERE) -> list[Fault]:
    return list(islice(_faults(Random(seed), kinds), faults))


def _faults(chance: Random, kinds: Sequence[Kind]) -> Iterator[Fault]:
    first = list(kinds)
    chance.shuffle(first)
    while True:
        kind = first.pop() if first else chance.choice(kinds)
        victims = _victims(kind, chance)
        yield Fault(kind, victims, _seconds(kind, victims, chance), round(chance.uniform(0, MAX_PAUSE_S), 2))


def _victims(kind: Kind, chance: Random) -> tuple[str, ...]:
    everybody = [name for names in ROLES.values() for name in names]
    match kind:
        case Kind.KILL_TRAINER | Kind.KILL_PSERVER | Kind.KILL_MASTER | Kind.KILL_ETCD:
            return (chance.choice(ROLES[kind.removeprefix("kill-")]),)
        case Kind.KILL_TWO:
            return tuple(sorted(chance.sample(everybody, 2)))
        case Kind.FREEZE_SHORT | Kind.FREEZE_LONG:
            return (chance.choice(ROLES[chance.choice(MEMBERS)]),)
        case Kind.FREEZE_ETCD:
            return ("etcd",)
        case Kind.FULL_DATA:  # mostly a process dies meanwhile: the launcher has something to write
            return (chance.choice(everybody),) if chance.random() < 0.75 else ()
        case _:
            return ()


def _seconds(kind: Kind, victims: tuple[str, ...], chance: Random) -> float:
    lease_s = MASTER_TTL_S if any(name.startswith("master") for name in victims) else LEASE_S
    match kind:
        case Kind.FREEZE_SHORT:
            return round(chance.uniform(0.2, 0.7) * lease_s, 1)
        case Kind.FREEZE_LONG:
            return chance.choice((1.5, 3.0)) * lease_s
        case Kind.FREEZE_ETCD | Kind.CUT_ETCD:
            return chance.choice(ETCD_SILENT_S)
        case Kind.LOSSY_ETCD | Kind.CUT_PSERVERS | Kind.LOSSY_PSERVERS | Kind.FULL_DATA | Kind.FULL_CHECKPOINTS:
            return round(chance.uniform(2.0, 5.0), 1)
        case _:
            return 0.0
