"""etcd, the master, the network, the faults, and one schedule of all of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.models.collective_epochs.member import Member
from tests.models.collective_epochs.values import (
    LANES,
    STEPS,
    Generation,
    Record,
    Steps,
    Version,
    spread,
    undisturbed,
)

FAULTY_TURNS, QUIET_TURNS = 1500, 8000
MOST_MEMBERS = 5


@dataclass
class Job:
    """etcd, the master, the network and the faults. `is_back`: everybody loads the checkpoint."""

    ablation: str = ""
    generation: Generation = field(default_factory=Generation)
    checkpoint: Version = field(default_factory=Version)
    is_back: bool = True
    faulty: bool = True
    members: dict[str, Member] = field(default_factory=dict)
    messages: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    discarded: set[Record] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    next_number: int = 1

    # ------------------------------------------------------------ promises

    def check(self, kept: bool, promise: str) -> None:
        if not kept:
            self.broken.append(promise)

    def check_bits(self, member: Member) -> None:
        assert member.version is not None
        same = member.version == undisturbed(member.version.steps)
        self.check(same, f"{member.name} has other bits of version {member.has} than one process")

    def check_versions(self, member: Member) -> None:
        """Of one generation."""
        assert member.version is not None
        for other in self.members.values():
            if (
                other.formed
                and other.seen is member.seen
                and other.version is not None
                and self.generation is member.seen
            ):
                common = min(other.has, member.has)
                same = other.version.steps[:common] == member.version.steps[:common]
                self.check(
                    same, f"{member.name} and {other.name} have made different steps up to version {common}"
                )
                owners = member.formed and {member.name, other.name} <= set(member.seen.owners)
                apart = abs(other.has - member.has) if owners else 0
                self.check(
                    apart <= 1,
                    f"owners {member.name} and {other.name} have versions {member.has} and {other.has}",
                )

    def completed(self, member: Member) -> None:
        self.check_bits(member)
        self.check_versions(member)

    def check_records(self, steps: Steps) -> None:
        """Each was counted once, or else discarded."""
        for lane in range(LANES):
            counted = [records[lane][1] for records in steps]
            lost = (
                {(lane, place) for place in range(counted[-1])}
                - {(lane, place) for place in counted}
                - self.discarded
            )
            self.check(
                counted == sorted(set(counted)) and not lost,
                f"lane {lane} counted records {counted}, lost {lost}",
            )

    # ------------------------------------------------------------ master

    def holders(self) -> list[str]:
        """By their keys in etcd."""
        there = self.members.values()
        return [m.name for m in there if m.registered and m.held and m.timeline == self.generation.timeline]

    def register_again(self, member: Member) -> None:
        """Its lease had run out; its key is its own. If nobody that is left has as new a version, the others
        go on from its one, and those that lack more than one join anew."""
        member.registered = True
        if member.has > 1 + min(
            (self.members[name].has for name in self.generation.owners if name in self.members), default=0
        ):
            for other in self.members.values():
                other.served = -1

    def is_silent(self, name: str) -> bool:
        return name not in self.members or self.members[name].frozen

    def reconcile(self, rng: random.Random) -> None:
        holders = self.holders()
        if not holders and not self.is_back:
            self.is_back = True
            self.publish(self.generation.timeline + 1, (), {}, {})
            self.seen["rolled back"] += 1
        elif set(holders) != set(self.generation.members):
            holders.sort(
                key=[*self.generation.members, *sorted(holders)].index
            )  # who comes is behind those that are there
            lanes = spread(tuple(holders), sorted(rng.choices(range(LANES + 1), k=len(holders) - 1)))
            since = {m: self.generation.since.get(m, self.next_number) for m in holders if len(lanes[m])}
            self.publish(self.generation.timeline, tuple(holders), lanes, since)
            self.is_back = self.is_back and not holders

    def publish(
        self, timeline: int, members: tuple[str, ...], lanes: dict[str, range], since: dict[str, int]
    ) -> None:
        self.generation = Generation(self.next_number, timeline, members, lanes, since)
        self.next_number += 1
        self.seen["generations"] += 1

    # ------------------------------------------------------------ network

    def send(self, to: str, kind: str, sender: Member, *what: Any) -> None:
        self.answer(sender, to, kind, sender.seen.number, *what)

    def answer(self, sender: Member, to: str, kind: str, generation: int, *what: Any) -> None:
        """`generation`: in which it was asked."""
        message = to, (kind, sender.name, generation, sender.timeline, *what)
        if message not in self.messages:
            self.messages.append(message)

    def deliver(self, rng: random.Random) -> None:
        """Any message, perhaps not for the last time, perhaps never."""
        place = rng.randrange(len(self.messages))
        to, message = self.messages[place]
        if self.faulty and rng.random() < 0.05:
            self.seen["doubled"] += 1
        else:
            self.messages[place] = self.messages[-1]
            self.messages.pop()
        if self.faulty and rng.random() < 0.02:
            return
        member = self.members.get(to)
        if member is None or not member.frozen:
            if member is not None:
                member.hear(self, *message)
        elif (to, message) not in self.messages:
            self.messages.append((to, message))  # it is read when the member goes on

    # ------------------------------------------------------------ faults

    def fault(self, rng: random.Random) -> None:
        kind = rng.choices(FAULTS, WEIGHTS)[0]
        there = list(self.members.values())
        awake = [member for member in there if not member.frozen]
        frozen = [member for member in there if member.frozen]
        self.seen[kind] += 1
        match kind:
            case "join" if len(there) < MOST_MEMBERS:
                self.join()
            case "kill" if there:
                del self.members[rng.choice(there).name]
            case "kill-all" if there:
                self.members.clear()
            case "freeze" if awake:
                rng.choice(awake).frozen = True
            case "lease" if frozen:
                rng.choice(frozen).registered = False
            case "thaw" if frozen:
                rng.choice(frozen).frozen = False
            case "checkpoint" if awake:
                member = rng.choice(awake)
                if member.version is not None and member.formed and member.seen is self.generation:
                    self.checkpoint = max(self.checkpoint, member.version, key=lambda version: version.number)
            case "master" if self.ablation == "ids-never-repeat":
                self.next_number = max(1, self.next_number - rng.randint(1, 3))

    def join(self) -> None:
        self.seen["members"] += 1
        name = f"m{self.seen['members']}"
        self.members[name] = Member(name)

    def heal(self) -> None:
        self.faulty = False
        for member in self.members.values():
            member.frozen, member.overruled = False, None
        if not self.members:
            self.join()


FAULTS = ("join", "kill", "kill-all", "freeze", "lease", "thaw", "checkpoint", "master")
WEIGHTS = (6, 4, 1, 5, 4, 5, 4, 2)


def run(seed: int, ablation: str = "") -> tuple[list[str], Counter[str]]:
    """The promises that one schedule broke, and what happened in it."""
    rng, job = random.Random(seed), Job(ablation)
    for _ in range(3):
        job.join()
    for turn in range(FAULTY_TURNS + QUIET_TURNS):
        if turn == FAULTY_TURNS:
            job.heal()
        event = rng.random()
        if job.faulty and event < 0.012:
            job.fault(rng)
        elif event < 0.05:
            job.reconcile(rng)
        elif event < 0.5 and job.messages:
            job.deliver(rng)
        elif awake := [member for member in job.members.values() if not member.frozen]:
            member = rng.choice(awake)
            if not member.registered and rng.random() < 0.2:
                job.register_again(member)
            member.act(job, rng)
        if job.broken:
            return job.broken, job.seen
        if not job.faulty and (last := finished(job)) is not None:
            job.check_records(last.steps)
            return job.broken, job.seen
    return [f"not finished after {QUIET_TURNS} turns without faults"], job.seen


def finished(job: Job) -> Version | None:
    """The last version, once all members have it."""
    versions = [member.version for member in job.members.values()]
    if any(version is None or version.number < STEPS for version in versions):
        return None
    return versions[0]
