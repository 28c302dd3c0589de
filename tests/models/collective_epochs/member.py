"""One member of a collective job: what it has, what it asks, and what it answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.models.collective_epochs.values import (
    BLOCKS,
    KEPT,
    LANES,
    MOMENTUM,
    RATE,
    STEPS,
    Generation,
    Lane,
    Means,
    Record,
    Statement,
    Steps,
    Version,
    World,
    gradient,
    tree_sum,
)


@dataclass
class Member:
    """One call or message per `act`. `version` None: it has no state. `kept`: mean gradients of the last
    versions; `made`: blocks of its own share of the next one; `arriving`: blocks of the next one that came;
    `computed`: its lanes of the open step, kept until the step is over."""

    name: str
    version: Version | None = None
    since: int = 0
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

    def statement(self, job: World) -> Statement:
        assert self.version is not None
        first = self.has + 1
        while len(self.kept.get(first - 1, {})) == BLOCKS:
            first -= 1
        stated = self.has if job.ablation == "stated-as-kept" else min(first - 1, self.has - 2)
        return Statement(
            self.has,
            first,
            self.since,
            {v: self.version.steps[v - 1] for v in range(max(1, stated), self.has + 1)},
        )

    def basis(self, job: World) -> tuple[str, Statement]:
        """The member whose version the generation goes on from: the first in the list that has the newest
        one."""
        said = {
            name: self.statement(job) if name == self.name else self.stated[name]
            for name in self.seen.members
        }
        if job.ablation == "statements":
            return self.name, self.statement(job)
        newest = max(one.has for one in said.values())
        return next((name, one) for name, one in said.items() if one.has == newest)

    def newest(self, job: World) -> int:
        return self.basis(job)[1].has

    def differs(self, job: World) -> bool:
        """Its version is made of other records than that of those who can give it the newest one."""
        mine = self.statement(job).made_of.get(self.has)
        _, basis = self.basis(job)
        known = {one.made_of.get(self.has, mine) for one in (basis, *self.same(basis).values())}
        return known != {mine} and job.ablation != "made-of"

    def same(self, basis: Statement) -> dict[str, Statement]:
        """Of those that have stated: who has the newest version, of the records of the basis."""
        newest = basis.has, basis.made_of.get(basis.has)
        return {
            name: one for name, one in self.stated.items() if (one.has, one.made_of.get(basis.has)) == newest
        }

    # ------------------------------------------------------------ generations

    def read(self, job: World, generation: Generation) -> None:
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

    def lose(self, job: World) -> None:
        """What it has is of no use any more: it joins anew. That never happens to one that is an owner since
        it was formed, if anybody that it asked can give it the next version."""
        able = any(one.since <= self.has < one.has <= self.has + 2 for one in self.stated.values())
        steady = able and self.served >= 0 and self.served == self.seen.since.get(self.name)
        job.check(
            not steady,
            f"{self.name} owns blocks since generation {self.served}, and loses version {self.has}",
        )
        self.forget()

    def forget(self) -> None:
        self.version, self.held, self.formed = None, False, False
        self.kept, self.computed, self.arriving, self.made, self.lane_data = {}, {}, {}, {}, {}
        self.acked, self.joining = set(), {}

    def form(self, job: World) -> None:
        """All others of the generation have stated what they have."""
        if self.has > self.newest(job) or self.differs(job):  # who knew this version is gone
            return self.lose(job)
        self.formed, self.served = True, self.seen.since.get(self.name, -1)
        job.check_versions(self)
        return None

    def act(self, job: World, rng: random.Random) -> None:
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
        return [
            lane
            for lane in self.seen.lanes_of[self.name]
            if any((k, lane) not in self.acked for k in range(BLOCKS))
        ]

    def compute_or_push(self, job: World, rng: random.Random, lane: Lane) -> None:
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

    def pull(self, job: World, rng: random.Random) -> None:
        """A block of the next version: from its owner, or from one that has the version already."""
        wanted = [k for k in range(BLOCKS) if k not in self.arriving and k not in self.made]
        if not wanted:
            return self.complete(job)
        block = rng.choice(wanted)
        if self.has < self.newest(job):
            same = self.same(self.basis(job)[1])
            able = [name for name, one in same.items() if one.first <= self.has + 1]
            givers = able if able and job.ablation != "given-by-joiners" else list(same)
        else:
            givers = [self.seen.owner(block)]
        if givers and givers != [self.name]:
            job.send(rng.choice(givers), "pull", self, self.has + 1, block)
        return None

    def complete(self, job: World) -> None:
        """All of the next version is there: the replica steps."""
        assert self.version is not None
        means = {**self.arriving, **self.made}
        job.check(
            len({records for _, records in means.values()}) == 1,
            f"{self.name} made a step of two sets of records",
        )
        self.version = self.version.stepped(means)
        self.kept[self.has] = means
        if job.ablation == "kept-means":
            own = {k for k in range(BLOCKS) if self.seen.owners and self.seen.owner(k) == self.name}
            self.kept[self.has] = {k: mean for k, mean in means.items() if k in own}
        self.kept.pop(self.has - KEPT, None)
        self.arriving, self.made, self.computed, self.acked, self.lane_data = {}, {}, {}, set(), {}
        job.completed(self)

    # ------------------------------------------------------------ joining

    def join(self, job: World, rng: random.Random) -> None:
        """The state block by block, from several members, at different versions; then the means of the
        versions since."""
        if self.seen.timeline != job.generation.timeline:
            return self.read(job, job.generation)
        if job.is_back and self.timeline == job.generation.timeline and not job.holders():
            self.version, self.since = (
                job.checkpoint,
                job.checkpoint.number,
            )  # everybody died: each loads the checkpoint
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
            self.version, self.since, self.joining = Version(values, momentum, newest), len(newest), {}
            job.check_bits(self)
        return None

    # ------------------------------------------------------------ messages

    def is_stale(self, job: World, generation: int, ablation: str) -> bool:
        return generation != self.seen.number and job.ablation != ablation

    def hear(self, job: World, kind: str, sender: str, generation: int, timeline: int, *what: Any) -> None:
        if timeline != self.timeline:
            return None
        return getattr(self, f"on_{kind}")(job, sender, generation, *what)

    def on_ask(self, job: World, sender: str, generation: int) -> None:
        if self.version is not None and not self.is_stale(job, generation, "fence-before-statement"):
            job.answer(self, sender, "statement", generation, self.statement(job))

    def on_statement(self, job: World, sender: str, generation: int, said: Statement) -> None:
        if generation == self.seen.number and sender in self.seen.members:
            self.stated.setdefault(sender, said)

    def on_push(
        self,
        job: World,
        sender: str,
        generation: int,
        step: int,
        block: int,
        lane: Lane,
        value: float,
        record: Record,
    ) -> None:
        if (
            self.is_stale(job, generation, "generation-fence")
            or not self.formed
            or self.seen.owner(block) != self.name
        ):
            return
        if step == self.has and block not in self.made:
            data = self.lane_data.setdefault(block, {})
            data.setdefault(lane, (value, record))
            if len(data) == LANES:
                inputs = [data[each] for each in range(LANES)]
                self.made[block] = (
                    tree_sum([each for each, _ in inputs]),
                    tuple(record for _, record in inputs),
                )
        if step <= self.has:
            job.answer(self, sender, "ack", generation, step, block, lane)

    def on_ack(self, job: World, sender: str, generation: int, step: int, block: int, lane: Lane) -> None:
        if not self.is_stale(job, generation, "steps-made-again") and step == self.has:
            self.acked.add((block, lane))

    def on_pull(self, job: World, sender: str, generation: int, version: int, block: int) -> None:
        if self.version is None or self.is_stale(job, generation, "generation-fence"):
            return
        if version == self.has + 1 and block in self.made:
            job.answer(self, sender, "mean", generation, version, block, self.made[block], None)
        elif block in self.kept.get(version, {}):
            job.answer(
                self, sender, "mean", generation, version, block, self.kept[version][block], self.version
            )
        elif version <= self.has:
            job.answer(self, sender, "gone", generation, version, block)

    def on_mean(
        self,
        job: World,
        sender: str,
        generation: int,
        version: int,
        block: int,
        mean: Any,
        at: Version | None,
    ) -> None:
        if self.is_stale(job, generation, "pulls-thrown-away"):
            return
        if self.version is not None and version == self.has + 1:
            self.arriving.setdefault(block, mean)
        elif self.version is None and at is not None and block in self.joining:
            steps, value, momentum = self.joining[block]
            if len(steps) + 1 == version and self.is_of_one_history(job, at.steps[:version]):
                momentum = MOMENTUM * momentum + mean[0]
                self.joining[block] = at.steps[:version], value - RATE * momentum, momentum

    def on_gone(self, job: World, sender: str, generation: int, version: int, block: int) -> None:
        if self.version is None:
            self.joining.pop(block, None)
        elif version == self.has + 1 and generation == self.seen.number:
            self.lose(job)

    def on_state(self, job: World, sender: str, generation: int, block: int) -> None:
        if self.version is not None:
            part = self.version.steps, self.version.params[block], self.version.momentum[block]
            job.answer(self, sender, "portion", generation, block, part)

    def on_portion(
        self, job: World, sender: str, generation: int, block: int, part: tuple[Steps, float, float]
    ) -> None:
        if self.version is None and self.is_of_one_history(job, part[0]):
            self.joining.setdefault(block, part)

    def is_of_one_history(self, job: World, steps: Steps) -> bool:
        """What comes, and what is collected. Else it begins anew: a donor has a version that is made of other
        records."""
        lengths = [(other, min(len(other), len(steps))) for other, _, _ in self.joining.values()]
        if all(other[:common] == steps[:common] for other, common in lengths) or job.ablation == "made-of":
            return True
        self.joining = {}
        return False
