"""Executable model of collective jobs: trainers average gradients among themselves, generation by generation, and no step is lost, doubled or torn.

    master: who holds the parameters ─► generation g, its members, lanes, owners of blocks (numbers never repeat)
    member: reads g ─► fenced ─► states its version ─► all have stated ─► who lacks the newest version gets its kept means ─► pushes, pulls, steps

Members are killed, frozen, thawed and joined at random between any two messages; messages are late, in any order, doubled and lost; masters change; all
may die, and go back to a checkpoint. A record may be discarded: then who computes its lane anew takes the next one, so a step of two generations
would show. When the faults stop, the run must end within a bound.

Always: members that are in one generation and have the same version have the same bits, those of the undisturbed run over the same records; a listed
member never loses its version. At the end each record was counted once, or discarded.

    python -m tests.models.collective_epochs [SCHEDULES] [ABLATION]

Each ablation switches one rule off, and must be caught. (Means are sums of lanes here, and a lane pushes for itself: any fixed tree serves the protocol.)
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

LANES, BLOCKS, STEPS, RATE, MOMENTUM = 4, 3, 6, 0.05, 0.9
FAULTY_TURNS, QUIET_TURNS = 1500, 8000
MOST_MEMBERS = 5
SCHEDULES = 800
ABLATIONS = {
    "kept-means": "a member keeps the mean gradients of its own share alone",
    "statements": "each member goes on from the version that it has itself",
    "fence-before-statement": "a version that a member states before it has read the generation counts",
    "made-of": "versions of one number are taken for the same, also if a step was made again with other records",
    "given-by-joiners": "the newest version counts, also if whoever has it joined at it and has no means of it",
    "ids-never-repeat": "a new master counts generations on from a number that was used",
    "verdict-before-rebuild": "a member that finds another one silent makes the next generation for itself",
    "generation-fence": "pushes of generations that are over are taken, and what they brought is kept",
    "pulls-thrown-away": "means that were asked for in a generation that is over count",
    "steps-made-again": "what was acknowledged in a generation that is over is not pushed again",
}

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
    return tuple(0.3 * noise(record, k) + 0.1 * (record[0] + 1) * params[k] + 0.01 * total for k in range(BLOCKS))


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
    """`owners`: members that have lanes; they share the blocks. `since`: by owner, the generation since which it has always been one."""

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
        return Generation(self.number + 1, self.timeline, left, spread(left, [LANES * i // len(left) for i in range(1, len(left))]))


def spread(members: tuple[str, ...], cuts: list[int]) -> dict[str, range]:
    ends = [0, *cuts, LANES]
    return {name: range(ends[i], ends[i + 1]) for i, name in enumerate(members)}


@dataclass(frozen=True)
class Statement:
    """What a member has: its version, the first one whose means it can give, and the records that its last versions are made of."""

    has: int
    first: int
    made_of: dict[int, tuple[Record, ...]]


@dataclass
class Member:
    """One call or message per `act`. `version` None: it has no state. `kept`: mean gradients of the last versions; `made`: blocks of its own share of the
    next one; `arriving`: blocks of the next one that came; `computed`: its lanes of the open step, kept until the step is over."""

    name: str
    version: Version | None = None
    timeline: int = 0
    seen: Generation = field(default_factory=Generation)
    stated: dict[str, Statement] = field(default_factory=dict)
    formed: bool = False
    kept: dict[int, Means] = field(default_factory=dict)
    lane_data: dict[int, dict[Lane, tuple[float, Record]]] = field(default_factory=dict)
    made: Means = field(default_factory=dict)
    arriving: Means = field(default_factory=dict)
    computed: dict[Lane, tuple[tuple[float, ...], Record]] = field(default_factory=dict)
    acked: set[tuple[int, Lane]] = field(default_factory=set)
    joining: dict[int, tuple[Steps, float, float]] = field(default_factory=dict)
    frozen: bool = False
    registered: bool = True  # its lease lives
    held: bool = False  # its key says that it has the parameters of `timeline`
    served: int = -1  # it has been an owner since that generation, and was formed since then
    overruled: Generation | None = None  # (an ablation: it has made another one for itself)

    @property
    def has(self) -> int:
        return self.version.number if self.version is not None else -1

    @property
    def listed(self) -> bool:
        return self.name in self.seen.members

    @property
    def statement(self) -> Statement:
        assert self.version is not None
        first = self.has + 1
        while len(self.kept.get(first - 1, {})) == BLOCKS:
            first -= 1
        return Statement(self.has, first, {v: self.version.steps[v - 1] for v in range(max(1, self.has - 2), self.has + 1)})

    def basis(self, job: Job) -> tuple[str, Statement]:
        """The member whose version the generation goes on from. The highest version that all have, or that somebody can give (not one of a member that
        joined at it and has no means of it: then it would be the others who lose what they have); of the first in the list that has it."""
        said = {name: self.statement if name == self.name else self.stated[name] for name in self.seen.members}
        if job.ablation == "statements":
            return self.name, self.statement
        lowest = min(one.has for one in said.values())
        may = {n: one for n, one in said.items() if one.has == lowest or one.first <= one.has or job.ablation == "given-by-joiners"}
        newest = max(one.has for one in may.values())
        return next((name, one) for name, one in said.items() if one.has == newest)

    def newest(self, job: Job) -> int:
        return self.basis(job)[1].has

    def differs(self, job: Job) -> bool:
        """Its version is made of other records than the one before the basis, or the basis."""
        mine = self.statement.made_of.get(self.has)
        return mine != self.basis(job)[1].made_of.get(self.has, mine) and job.ablation != "made-of"

    # ------------------------------------------------------------ generations

    def read(self, job: Job, generation: Generation) -> None:
        """Another generation, in one instant: what belongs to the one before does not count any more."""
        if generation.timeline != self.timeline:
            self.forget()
            self.timeline = generation.timeline
        self.seen, self.stated, self.formed = generation, {}, False
        if job.ablation != "generation-fence":
            self.lane_data, self.made = {}, {}
        if job.ablation != "pulls-thrown-away":
            self.arriving = {}
        if job.ablation != "steps-made-again":
            self.acked = set()

    def lose(self, job: Job) -> None:
        """What it has is of no use any more: it joins anew. That never happens to one that is an owner since it was formed."""
        steady = self.served >= 0 and self.served == self.seen.since.get(self.name)
        job.check(not steady, f"{self.name} owns blocks since generation {self.served}, and loses version {self.has}")
        self.forget()

    def forget(self) -> None:
        self.version, self.held, self.formed = None, False, False
        self.kept, self.computed, self.arriving, self.made, self.lane_data = {}, {}, {}, {}, {}
        self.acked, self.joining = set(), {}

    def form(self, job: Job) -> None:
        """All others of the generation have stated what they have."""
        if self.has > self.newest(job) or self.differs(job):  # who knew this version is gone, or it cannot be given to the others
            return self.lose(job)
        self.formed, self.served = True, self.seen.since.get(self.name, -1)
        job.check_versions(self)
        return None

    def act(self, job: Job, rng: random.Random) -> None:
        if self.seen is not job.generation is not self.overruled and rng.random() < 0.3:
            return self.read(job, job.generation)
        if self.version is None:
            return self.join(job, rng)
        self.held = True
        others = [name for name in self.seen.members if name != self.name]
        if self.seen.timeline != self.timeline or not self.seen.members:
            return None
        if job.ablation == "verdict-before-rebuild" and len(others) > 1 and self.listed and job.faulty:
            silent = [name for name in others if job.is_silent(name) or rng.random() < 0.002]
            if silent and rng.random() < 0.1:
                self.overruled = job.generation
                return self.read(job, self.seen.without(rng.choice(silent)))
        if missing := [name for name in others if name not in self.stated]:
            return job.send(rng.choice(missing), "ask", self)
        if not self.formed and (self.has >= self.newest(job) or self.differs(job)):
            return self.form(job)
        if self.has >= STEPS:
            return None
        if self.formed and self.listed and (lanes := self.open_lanes()) and rng.random() < 0.6:
            return self.compute_or_push(job, rng, rng.choice(lanes))
        return self.pull(job, rng)

    # ------------------------------------------------------------ steps

    def open_lanes(self) -> list[Lane]:
        """That have data to push."""
        return [lane for lane in self.seen.lanes_of[self.name] if any((k, lane) not in self.acked for k in range(BLOCKS))]

    def compute_or_push(self, job: Job, rng: random.Random, lane: Lane) -> None:
        assert self.version is not None
        if lane not in self.computed:
            record = self.version.next_record(lane, job.discarded)
            if job.faulty and rng.random() < 0.05:
                job.discarded.add(record)  # the user's code fails on it too often
                return
            self.computed[lane] = gradient(self.version.params, record), record
        values, record = self.computed[lane]
        block = rng.choice([k for k in range(BLOCKS) if (k, lane) not in self.acked])
        job.send(self.seen.owner(block), "push", self, self.has, block, lane, values[block], record)

    def pull(self, job: Job, rng: random.Random) -> None:
        """A block of the next version: from its owner, or from one that has the version already."""
        wanted = [k for k in range(BLOCKS) if k not in self.arriving and k not in self.made]
        if not wanted:
            return self.complete(job)
        block = rng.choice(wanted)
        if self.has < self.newest(job):
            _, basis = self.basis(job)
            same = {n: one for n, one in self.stated.items() if (one.has, one.made_of.get(basis.has)) == (basis.has, basis.made_of.get(basis.has))}
            able = [name for name, one in same.items() if one.first <= self.has + 1]
            givers = able if able and job.ablation != "given-by-joiners" else list(same)
        else:
            givers = [self.seen.owner(block)]
        if givers and givers != [self.name]:
            job.send(rng.choice(givers), "pull", self, self.has + 1, block)

    def complete(self, job: Job) -> None:
        """All of the next version is there: the replica steps."""
        assert self.version is not None
        means = {**self.arriving, **self.made}
        job.check(len({records for _, records in means.values()}) == 1, f"{self.name} made a step of two sets of records")
        self.version = self.version.stepped(means)
        self.kept[self.has] = means
        if job.ablation == "kept-means":
            own = {k for k in range(BLOCKS) if self.seen.owners and self.seen.owner(k) == self.name}
            self.kept[self.has] = {k: mean for k, mean in means.items() if k in own}
        self.kept.pop(self.has - 2, None)
        self.arriving, self.made, self.computed, self.acked, self.lane_data = {}, {}, {}, set(), {}
        job.completed(self)

    # ------------------------------------------------------------ joining

    def join(self, job: Job, rng: random.Random) -> None:
        """The state block by block, from several members, at different versions; then the means of the versions since."""
        if self.seen.timeline != job.generation.timeline:
            return self.read(job, job.generation)
        if job.is_back and self.timeline == job.generation.timeline and not job.holders():
            self.version = job.checkpoint  # everybody died: each loads the checkpoint
            self.kept, self.joining = {}, {}
            return None
        donors = [name for name in job.holders() if name != self.name]
        if not donors:
            return None
        lacking = [k for k in range(BLOCKS) if k not in self.joining]
        newest = max((steps for steps, _, _ in self.joining.values()), key=len, default=())
        behind = [k for k, (steps, _, _) in self.joining.items() if len(steps) < len(newest)]
        if lacking:
            job.send(rng.choice(donors), "state", self, rng.choice(lacking))
        elif behind:
            block = rng.choice(behind)
            job.send(rng.choice(donors), "pull", self, len(self.joining[block][0]) + 1, block)
        else:
            values, momentum = (tuple(self.joining[k][part] for k in range(BLOCKS)) for part in (1, 2))
            self.version, self.joining = Version(values, momentum, newest), {}
            job.check_bits(self)
        return None

    # ------------------------------------------------------------ messages

    def is_stale(self, job: Job, generation: int, ablation: str) -> bool:
        return generation != self.seen.number and job.ablation != ablation

    def hear(self, job: Job, kind: str, sender: str, generation: int, timeline: int, *what: Any) -> None:
        if timeline != self.timeline:
            return None
        return getattr(self, f"on_{kind}")(job, sender, generation, *what)

    def on_ask(self, job: Job, sender: str, generation: int) -> None:
        if self.version is not None and not self.is_stale(job, generation, "fence-before-statement"):
            job.answer(self, sender, "statement", generation, self.statement)

    def on_statement(self, job: Job, sender: str, generation: int, said: Statement) -> None:
        if generation == self.seen.number and sender in self.seen.members:
            self.stated.setdefault(sender, said)

    def on_push(self, job: Job, sender: str, generation: int, step: int, block: int, lane: Lane, value: float, record: Record) -> None:
        if self.is_stale(job, generation, "generation-fence") or not self.formed or self.seen.owner(block) != self.name:
            return
        if step == self.has and block not in self.made:
            data = self.lane_data.setdefault(block, {})
            data.setdefault(lane, (value, record))
            if len(data) == LANES:
                inputs = [data[each] for each in range(LANES)]
                self.made[block] = tree_sum([each for each, _ in inputs]), tuple(record for _, record in inputs)
        if step <= self.has:
            job.answer(self, sender, "ack", generation, step, block, lane)

    def on_ack(self, job: Job, sender: str, generation: int, step: int, block: int, lane: Lane) -> None:
        if not self.is_stale(job, generation, "steps-made-again") and step == self.has:
            self.acked.add((block, lane))

    def on_pull(self, job: Job, sender: str, generation: int, version: int, block: int) -> None:
        if self.version is None or self.is_stale(job, generation, "generation-fence"):
            return
        if version == self.has + 1 and block in self.made:
            job.answer(self, sender, "mean", generation, version, block, self.made[block], None)
        elif block in self.kept.get(version, {}):
            job.answer(self, sender, "mean", generation, version, block, self.kept[version][block], self.version)
        elif version <= self.has:
            job.answer(self, sender, "gone", generation, version, block)

    def on_mean(self, job: Job, sender: str, generation: int, version: int, block: int, mean: Any, at: Version | None) -> None:
        if self.is_stale(job, generation, "pulls-thrown-away"):
            return
        if self.version is not None and version == self.has + 1:
            self.arriving.setdefault(block, mean)
        elif self.version is None and at is not None and block in self.joining:
            steps, value, momentum = self.joining[block]
            if len(steps) + 1 == version and at.steps[: len(steps)] == steps:
                momentum = MOMENTUM * momentum + mean[0]
                self.joining[block] = at.steps[:version], value - RATE * momentum, momentum

    def on_gone(self, job: Job, sender: str, generation: int, version: int, block: int) -> None:
        if self.version is None:
            self.joining.pop(block, None)
        elif version == self.has + 1 and generation == self.seen.number:
            self.lose(job)

    def on_state(self, job: Job, sender: str, generation: int, block: int) -> None:
        if self.version is not None:
            part = self.version.steps, self.version.params[block], self.version.momentum[block]
            job.answer(self, sender, "portion", generation, block, part)

    def on_portion(self, job: Job, sender: str, generation: int, block: int, part: tuple[Steps, float, float]) -> None:
        if self.version is None:
            self.joining.setdefault(block, part)


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

    def check(self, kept: bool, promise: str) -> None:  # noqa: FBT001
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
            if other.formed and other.seen is member.seen and other.version is not None and self.generation is member.seen:
                common = min(other.has, member.has)
                same = other.version.steps[:common] == member.version.steps[:common]
                self.check(same, f"{member.name} and {other.name} have made different steps up to version {common}")
                apart = abs(other.has - member.has) if {member.name, other.name} <= set(member.seen.owners) else 0
                self.check(apart <= 1, f"owners {member.name} and {other.name} have versions {member.has} and {other.has}")

    def completed(self, member: Member) -> None:
        self.check_bits(member)
        self.check_versions(member)

    def check_records(self, steps: Steps) -> None:
        """Each was counted once, or else discarded."""
        for lane in range(LANES):
            counted = [records[lane][1] for records in steps]
            lost = {(lane, place) for place in range(counted[-1])} - {(lane, place) for place in counted} - self.discarded
            self.check(counted == sorted(set(counted)) and not lost, f"lane {lane} counted records {counted}, lost {lost}")

    # ------------------------------------------------------------ master

    def holders(self) -> list[str]:
        """By their keys in etcd."""
        there = self.members.values()
        return [m.name for m in there if m.registered and m.held and m.timeline == self.generation.timeline]

    def register_again(self, member: Member) -> None:
        """Its lease had run out; its key is its own. If nobody that is left has as new a version, the others go on from its one, and those that lack
        more than one join anew."""
        member.registered = True
        if member.has > 1 + min((self.members[name].has for name in self.generation.owners if name in self.members), default=0):
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
            holders.sort(key=[*self.generation.members, *sorted(holders)].index)  # who comes is behind those that are there
            lanes = spread(tuple(holders), sorted(rng.choices(range(LANES + 1), k=len(holders) - 1)))
            since = {m: self.generation.since.get(m, self.next_number) for m in holders if len(lanes[m])}
            self.publish(self.generation.timeline, tuple(holders), lanes, since)
            self.is_back = self.is_back and not holders

    def publish(self, timeline: int, members: tuple[str, ...], lanes: dict[str, range], since: dict[str, int]) -> None:
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


def main(arguments: list[str]) -> int:
    schedules = int(arguments[0]) if arguments else SCHEDULES
    ablation = arguments[1] if len(arguments) > 1 else ""
    if ablation and ablation not in ABLATIONS:
        print(f"no ablation {ablation!r}; there are {', '.join(ABLATIONS)}")
        return 2
    wrong: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for seed in range(schedules):
        broken, happened = run(seed, ablation)
        seen += happened
        if broken:
            wrong[seed] = broken[0]
        if wrong and ablation:
            break
    print(f"{seed + 1} schedules, wrong: {len(wrong)} {dict(list(wrong.items())[:5])}; {dict(seen)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
