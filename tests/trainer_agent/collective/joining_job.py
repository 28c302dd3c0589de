"""Trainers that train on, and one that gets their state: in one event loop, without services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import torch

from tests.simulation.compute import Speed, TinyCompute, Trace
from tests.trainer_agent.collective.test_replica import record
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.catching_up import CatchingUp, Step
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.collective.state.messages import Portion, StateRequest
from trainer_agent.model.flat import Place
from trireme_shared.protocol.errors import Gone, PeerError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.step import StepRecord, StepResult

STEP_S = 0.05
ENVELOPE = {"job": "j", "generation": 1}


def tiny() -> TinyCompute:
    return TinyCompute(Mode.SYNC, Trace(), random.Random(0), Speed())


class Layerwise(TinyCompute):
    """Parameters that share blocks, span them, or both, of a rule that needs them whole."""

    places = tuple(
        Place(str(first), segment, first, (count,), (1,), count)
        for segment, first, count in ((0, 0, 16), (0, 16, 128), (0, 144, 48), (1, 0, 128))
    )

    @property
    def layout(self) -> Layout:
        options = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01, "layerwise": True}
        spec = OptimizerSpec(name="LAMB", defaults=options, groups=(options, options))
        return super().layout.model_copy(update={"optimizer": spec})


def layerwise() -> TinyCompute:
    return Layerwise(Mode.SYNC, Trace(), random.Random(0), Speed())


def gradients(compute: TinyCompute, step: int) -> dict[int, torch.Tensor | None]:
    """Some blocks have none, in some steps; of parameters, where the rule needs them whole, all blocks have
    none then."""
    if compute.layout.optimizer.name == "LAMB" and step % 5 == 4:
        return dict.fromkeys(block.number for block in compute.layout.blocks())
    generator = torch.Generator().manual_seed(step)
    found: dict[int, torch.Tensor | None] = {}
    for block in compute.layout.blocks():
        value = torch.randn(block.elements, generator=generator)
        value = value if block.dtype == "float32" else torch.arange(block.elements) + step + 1
        has = step + block.number if compute.layout.optimizer.name != "LAMB" else 1
        found[block.number] = value if has % 5 else None
    return found


class Member:
    """One that trains, and gives."""

    def __init__(self, name: str, make: Callable[[], TinyCompute] = tiny) -> None:
        self.name = name
        self.compute = make()
        self.replica = Replica(self.compute)
        self.replica.begin(lanes=1)
        self.results: tuple[StepResult, ...] = ()
        self.giver = StateGiver("j", self.compute, self.replica, self.saved)
        self.dead, self.together = False, True
        self.delay_s: Callable[[StateRequest], float] = lambda _: 0.0
        self.spoil = 0
        self.asked = 0

    def saved(self, record: StepRecord) -> StepRecord:
        return record.model_copy(update={"results": self.results})

    async def state(self, request: StateRequest) -> Portion:
        self.asked += bool(request.blocks)
        if self.dead:
            raise PeerError(f"{self.name} is gone")
        asked = request if self.together else request.model_copy(update={"together": 1})
        portion = await self.giver.give(asked)
        await asyncio.sleep(self.delay_s(request) if request.blocks else 0.0)
        if self.dead:
            raise PeerError(f"{self.name} is gone")
        if self.spoil and portion.parts:
            self.spoil -= 1
            portion.parts[0][1][0] ^= 1
        return portion

    async def close(self) -> None:
        pass

    async def step(self) -> None:
        """As an exchange does it: the states change before the version does."""
        version = self.replica.version
        assert version is not None
        self.replica.stepping = True
        self.replica.step(gradients(self.compute, version), record(version + 1))
        await asyncio.sleep(0.004)
        self.replica.swap()


class Exchange:
    """Follow: the test knows all gradients. Two versions are kept."""

    def __init__(self, members: list[Member]) -> None:
        self.members, self.compute = members, members[0].compute
        self.slow_s = 0.0
        self.released = self.taken = 0

    def begin(self, record: StepRecord, timeline: int) -> None:
        assert record.version <= self.newest
        self.began = record

    @property
    def newest(self) -> int:
        return max(member.replica.version or 0 for member in self.members)

    async def wait(self, version: int) -> None:
        await asyncio.sleep(self.slow_s)
        while self.newest < version:
            await asyncio.sleep(0.003)
        if version < self.newest - 1:
            raise Gone(f"version {version} is not kept")

    def take(self, version: int) -> Step:
        self.taken += 1
        return Step(record(version), gradients(self.compute, version - 1), self._release)

    def measured(self, version: int, norm: float) -> StepRecord:
        raise AssertionError("nothing is clipped")

    def _release(self) -> None:
        self.released += 1


class Job:
    def __init__(self, members: int = 3, make: Callable[[], TinyCompute] = tiny) -> None:
        self.make = make
        self.members = [Member(name, make) for name in "abc"[:members]]
        self.exchange = Exchange(self.members)
        self.compute = make()
        self.replica = Replica(self.compute)
        self.attempt = CatchingUp(self.compute, self.members, self.exchange, lambda: ENVELOPE, 0, "")

    async def train(self) -> None:
        while True:
            for member in self.members:
                if not member.dead:
                    await member.step()
            await asyncio.sleep(STEP_S)

    async def join(self, limit_s: float = 60.0) -> None:
        training = asyncio.ensure_future(self.train())
        try:
            await asyncio.sleep(3 * STEP_S)
            async with asyncio.timeout(limit_s):
                await self.attempt.run()
        finally:
            training.cancel()
        self.attempt.hand_over(self.replica)

    def check(self) -> None:
        """It has the bits of one that trained from the start, and so it has after the next step."""
        undisturbed = Member("u", self.make)
        assert self.replica.version is not None
        for version in range(self.replica.version + 1):
            if version:
                undisturbed.replica.step(gradients(undisturbed.compute, version - 1), record(version))
                undisturbed.replica.swap()
        assert self.replica.record == record(self.replica.version)
        for _ in range(2):
            assert self.replica.digest() == undisturbed.replica.digest()
            version = undisturbed.replica.version
            assert version is not None
            for replica, compute in (
                (self.replica, self.compute),
                (undisturbed.replica, undisturbed.compute),
            ):
                replica.step(gradients(compute, version), record(version + 1))
                replica.swap()
