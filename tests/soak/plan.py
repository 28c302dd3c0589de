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
from trireme_shared.protocol.records import Strategy

LEASE_S = 2.0
MAX_PAUSE_S = 1.0


@dataclass(frozen=True)
class Crew:
    """The processes of a job. `frozen`: the roles that a freeze draws from. `spared`: names that no signal is
    sent to."""

    trainers: int
    pservers: int
    standbys: int
    frozen: tuple[str, ...]
    spared: frozenset[str] = frozenset()

    @property
    def roles(self) -> dict[str, list[str]]:
        counts = {"trainer": self.trainers, "pserver": self.pservers, "master": 1 + self.standbys}
        found = {role: [f"{role}-{number}" for number in range(count)] for role, count in counts.items()}
        return {
            role: [name for name in names if name not in self.spared] for role, names in found.items()
        } | {"etcd": ["etcd"]}


CREWS = {
    Strategy.PARAMETER_SERVER: Crew(2, 2, 1, ("trainer", "pserver", "master")),
    Strategy.COLLECTIVE: Crew(4, 0, 1, ("trainer", "trainer", "trainer", "master")),
}
SERVERS = CREWS[Strategy.PARAMETER_SERVER]


class Kind(StrEnum):
    """kill: SIGKILL. freeze: SIGSTOP, later SIGCONT; a short one is over before the lease, a long one after
    it. cut: all packets to and from the ports are dropped; lossy: `LOSS` of them. full: no byte can be
    written below the folder. Only collective jobs: kill-joiner: a trainer, then its replacement `seconds`
    later; kill-trainers: all at once; resize: fewer, then as before."""

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
    KILL_JOINER = "kill-joiner"
    KILL_TRAINERS = "kill-trainers"
    RESIZE = "resize"


PSERVER_PACKETS = frozenset({Kind.CUT_PSERVERS, Kind.LOSSY_PSERVERS})
PACKETS = frozenset({Kind.CUT_ETCD, Kind.LOSSY_ETCD}) | PSERVER_PACKETS
DISKS = frozenset({Kind.FULL_DATA, Kind.FULL_CHECKPOINTS})
OF_PSERVERS = frozenset({Kind.KILL_PSERVER}) | PSERVER_PACKETS
OF_COLLECTIVE = frozenset({Kind.KILL_JOINER, Kind.KILL_TRAINERS, Kind.RESIZE})
KINDS = {
    Strategy.PARAMETER_SERVER: tuple(kind for kind in Kind if kind not in OF_COLLECTIVE),
    Strategy.COLLECTIVE: tuple(kind for kind in Kind if kind not in OF_PSERVERS),
}
ANYWHERE = tuple(kind for kind in KINDS[Strategy.PARAMETER_SERVER] if kind not in PACKETS | DISKS)
LOSS = 0.3
ETCD_SILENT_S = (2.0, 6.0, 10.0)


def harmless(transport: str) -> frozenset[Kind]:
    """Those that would harm nobody: members of one host reach a parameter server through its UNIX socket, in
    all they ask of it, unless `transport` is tcp."""
    return frozenset() if transport == "tcp" else PACKETS & OF_PSERVERS


@dataclass(frozen=True)
class Fault:
    """`after_s`: pause since training went on from the fault before. `victims`: processes that get the
    signal. `seconds`: how long it lasts; 0 for a kill. `trainers`: how many a resize asks for."""

    kind: Kind
    victims: tuple[str, ...]
    seconds: float
    after_s: float
    trainers: int = 0

    def __str__(self) -> str:
        what = " ".join((self.kind, *([" and ".join(self.victims)] if self.victims else [])))
        what += f" to {self.trainers}" if self.trainers else ""
        return f"{what} for {self.seconds:g} s" if self.seconds else what


def plan(seed: int, faults: int, kinds: Sequence[Kind] = ANYWHERE, crew: Crew = SERVERS) -> list[Fault]:
    return list(islice(_faults(Random(seed), kinds, crew), faults))


def _faults(chance: Random, kinds: Sequence[Kind], crew: Crew) -> Iterator[Fault]:
    first = list(kinds)
    chance.shuffle(first)
    while True:
        kind = first.pop() if first else chance.choice(kinds)
        victims = _victims(kind, chance, crew)
        seconds, after_s = _seconds(kind, victims, chance), round(chance.uniform(0, MAX_PAUSE_S), 2)
        yield Fault(
            kind, victims, seconds, after_s, chance.randrange(1, crew.trainers) if kind is Kind.RESIZE else 0
        )


def _victims(kind: Kind, chance: Random, crew: Crew) -> tuple[str, ...]:
    roles = crew.roles
    everybody = [name for names in roles.values() for name in names]
    match kind:
        case Kind.KILL_TRAINER | Kind.KILL_PSERVER | Kind.KILL_MASTER | Kind.KILL_ETCD:
            return (chance.choice(roles[kind.removeprefix("kill-")]),)
        case Kind.KILL_JOINER:
            return (chance.choice(roles["trainer"]),)
        case Kind.KILL_TRAINERS:
            return tuple(roles["trainer"])
        case Kind.KILL_TWO:
            return tuple(sorted(chance.sample(everybody, 2)))
        case Kind.FREEZE_SHORT | Kind.FREEZE_LONG:
            return (chance.choice(roles[chance.choice(crew.frozen)]),)
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
        case Kind.KILL_JOINER:
            return round(chance.uniform(0.0, 2.0), 2)
        case Kind.FREEZE_LONG:
            return chance.choice((1.5, 3.0)) * lease_s
        case Kind.FREEZE_ETCD | Kind.CUT_ETCD:
            return chance.choice(ETCD_SILENT_S)
        case (
            Kind.LOSSY_ETCD | Kind.CUT_PSERVERS | Kind.LOSSY_PSERVERS | Kind.FULL_DATA | Kind.FULL_CHECKPOINTS
        ):
            return round(chance.uniform(2.0, 5.0), 1)
        case _:
            return 0.0
