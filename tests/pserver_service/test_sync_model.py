"""design/models/sync_protocol.py against the product's own pserver: random schedules, and four ablations that
must show.

Trainers join, die, freeze and wake at random between any two messages; when the faults stop, the run must end
within a bound, and its parameters must have exactly the bits of the undisturbed run.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.equipment.virtual_loop import run_virtually
from tests.pserver_service.jobs import (
    check_invariants,
    initialised,
    item,
    layout_of,
    pull_request,
    pulled,
    push_header,
    stream,
    values_of,
)
from trireme_shared.protocol.errors import StaleGeneration
from trireme_shared.protocol.lanes import aligned_intervals, combine
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.blocks import Accumulator, BlockState, Node
from trireme_shared.serving.pserver import Pserver

LANES, BLOCKS, ELEMENTS, STEPS = 8, 4, 5, 10
FAULTY_TURNS, QUIET_TURNS = 600, 8_000
SEEDS = 25
LAYOUT = layout_of(*[ELEMENTS] * BLOCKS)
OPTIONS = ({"lr": 0.05},)


def gradient(params: torch.Tensor, step: int, lane: int) -> torch.Tensor:
    """Depends on the whole vector, so that a mixture of versions shows in the bits."""
    noise = torch.randn(BLOCKS * ELEMENTS, generator=torch.Generator().manual_seed(step * 100 + lane))
    return noise * 0.3 + params * (0.1 * (lane + 1)) + params.sum() * 0.01


def count_of(lane: int) -> int:
    """Samples in a lane: not all the same, and one lane without data."""
    return 0 if lane == 5 else 4 + lane % 3


def node(first: int, last: int, of_lane: dict[int, torch.Tensor]) -> tuple[torch.Tensor, int]:
    if last - first == 1:
        return of_lane[first].clone(), count_of(first)
    middle = (first + last) // 2
    return combine(*node(first, middle, of_lane), *node(middle, last, of_lane))


def undisturbed() -> torch.Tensor:
    params = torch.nn.Parameter(torch.cat(list(values_of(LAYOUT).values())))
    optimizer = torch.optim.SGD([params], lr=0.05, momentum=0.9)
    for step in range(STEPS):
        params.grad, _ = node(
            0, LANES, {lane: gradient(params.detach(), step, lane) for lane in range(LANES)}
        )
        optimizer.step()
    return params.detach()


@dataclass
class Trainer:
    """One message per call of `act`; forgets everything and joins again when it hears GONE."""

    name: int
    params: torch.Tensor | None = None
    step: int = 0
    generation: int = -1
    lanes: tuple[int, int] = (0, 0)
    joining_at: int | None = None
    outbox: list | None = None
    staged: dict[int, torch.Tensor] = field(default_factory=dict)

    async def act(self, job: Job, rng: random.Random) -> None:
        if self.generation != job.generation and self.name in job.lanes_of and rng.random() < 0.7:
            self.generation, self.lanes = job.generation, job.lanes_of[self.name]
            self.outbox, self.staged, self.joining_at = None, {}, None
        if self.generation < 0:
            return
        if self.params is None:
            await self._join(job, rng)
        elif self.step < STEPS and self.outbox is None:
            self.outbox = []
            for first, last in aligned_intervals(*self.lanes):
                of_lane = {lane: gradient(self.params, self.step, lane) for lane in range(first, last)}
                mean, count = node(first, last, of_lane)
                self.outbox += [
                    (k, (first, last), mean[k * ELEMENTS : (k + 1) * ELEMENTS], count) for k in range(BLOCKS)
                ]
            rng.shuffle(self.outbox)
        elif self.step < STEPS and self.outbox and rng.random() < 0.7:
            block, lanes, value, count = self.outbox.pop()
            header = push_header(self.step, range(*self.lanes), OPTIONS, generation=self.generation)
            try:
                answer = await job.pserver.push(header, stream(item(block, value, lanes, count)))
            except StaleGeneration:
                job.answers["STALE_GENERATION"] += 1
                return
            job.answers.update([refusal.code for refusal in answer.refused])
            job.answers.update({"APPLIED": answer.applied, "DUPLICATE": answer.duplicate})
        elif self.step < STEPS:
            await self._pull(job, rng.randrange(BLOCKS), self.step + 1, done=not self.outbox)

    async def _join(self, job: Job, rng: random.Random) -> None:
        if self.joining_at is None:
            self.joining_at, self.staged = (await job.pserver.info()).lowest, {}
        await self._pull(job, rng.randrange(BLOCKS), self.joining_at, done=True)

    async def _pull(self, job: Job, block: int, version: int, *, done: bool) -> None:
        if block not in self.staged:
            found, end = await pulled(job.pserver, pull_request(version, [block], generation=self.generation))
            if end.code == "GONE":
                job.answers["GONE"] += 1
                self.params, self.joining_at, self.staged = None, None, {}
                return
            if end.code == "OK":
                assert end.record is not None
                assert [position.lane for position in end.record.positions] == list(range(LANES))
                self.staged[block] = found[block]
                if job.mixed_pull and self.params is not None:
                    self.params = self.params.clone()
                    self.params[block * ELEMENTS : (block + 1) * ELEMENTS] = found[block]
        if done and len(self.staged) == BLOCKS:
            self.params, self.step = torch.cat([self.staged[k] for k in range(BLOCKS)]), version
            self.joining_at, self.staged, self.outbox = None, {}, None


@dataclass
class Job:
    pserver: Pserver
    mixed_pull: bool
    generation: int = 0
    lanes_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)

    def assign(self, trainers: list[int], rng: random.Random) -> None:
        """A new generation: contiguous lanes for each trainer, some may get none (hot spares)."""
        self.generation += 1
        rng.shuffle(trainers)
        cuts = [0, *sorted(rng.choices(range(LANES + 1), k=len(trainers) - 1)), LANES]
        self.lanes_of = {name: (cuts[i], cuts[i + 1]) for i, name in enumerate(trainers)}


async def run(seed: int, *, mixed_pull: bool = False) -> tuple[bool, Counter[str]]:
    pserver, _ = await initialised(LAYOUT, lanes=LANES)
    rng, job, names = random.Random(seed), Job(pserver, mixed_pull), iter(range(1, 10**6))
    trainers: dict[int, Trainer] = {}
    zombies: list[Trainer] = []

    def join() -> None:
        name = next(names)
        trainers[name] = Trainer(name)
        job.assign(list(trainers), rng)

    for _ in range(3):
        join()
    for turn in range(FAULTY_TURNS + QUIET_TURNS):
        if (await pserver.info()).lowest >= STEPS:
            break
        event = rng.random() if turn < FAULTY_TURNS else 1.0
        if event < 0.008 and len(trainers) < 6:
            join()
        elif event < 0.016 and len(trainers) > 1:
            gone = trainers.pop(rng.choice(list(trainers)))
            zombies += [gone] if rng.random() < 0.5 else []
            job.assign(list(trainers), rng)
        elif event < 0.018:
            trainers.clear()
            join()
        elif zombies and event < 0.08:
            await rng.choice(zombies).act(job, rng)
        else:
            await rng.choice(list(trainers.values())).act(job, rng)
    assert pserver.store is not None
    final = torch.cat([pserver.store.blocks[k].current.tensor for k in range(BLOCKS)])
    check_invariants(pserver)
    return torch.equal(final, undisturbed()), job.answers


def played(seed: int, *, mixed_pull: bool = False) -> tuple[bool, Counter[str]]:
    """In virtual time: thousands of pulls wait for a version that is not there yet."""
    good, answers = run_virtually(partial(run, mixed_pull=mixed_pull), seed, shuffled=False)
    return good, answers


def wrong_seeds(**options: bool) -> list[int]:
    """Seeds up to the first wrong one, as an ablation needs only one."""
    for seed in range(SEEDS):
        good, _ = played(seed, **options)
        if not good:
            return [seed]
    return []


def test_any_schedule_of_joins_deaths_and_zombies_ends_with_the_undisturbed_bits():
    answers: Counter[str] = Counter()
    for seed in range(SEEDS):
        good, seen = played(seed)
        assert good, f"seed {seed}"
        answers += seen
    assert all(answers[code] > 0 for code in ("APPLIED", "DUPLICATE", "STALE_GENERATION", "GONE")), answers


def test_without_the_previous_version_a_torn_step_is_not_repaired(monkeypatch):
    def pull(self, version):
        return (
            self.current
            if version == self.version
            else Verdict.TOO_EARLY
            if version > self.version
            else Verdict.GONE
        )

    monkeypatch.setattr(BlockState, "pull", pull)
    assert wrong_seeds()


def test_without_superseding_overlapping_intervals_never_get_whole(monkeypatch):
    def covers(self, lanes):
        return any(first < lanes[1] and lanes[0] < last for first, last in self.nodes)

    monkeypatch.setattr(Accumulator, "covers", covers)
    assert wrong_seeds()


def test_combining_in_order_of_arrival_changes_bits(monkeypatch):
    def add(self, lanes, value, count, _memory, _payload, **_):
        self._supersede(lanes)
        self.nodes[lanes] = Node(None if value is None else value.clone(), count)
        if sum(last - first for first, last in self.nodes) < LANES:
            return None
        parts = [(part.value, part.count) for part in self.nodes.values() if part.value is not None]
        self.nodes.clear()
        total = parts[0]
        for part in parts[1:]:
            total = combine(*total, *part)
        return Node(*total)

    monkeypatch.setattr(Accumulator, "add", add)
    assert wrong_seeds()


def test_a_trainer_that_mixes_versions_changes_bits():
    assert wrong_seeds(mixed_pull=True)
