"""A trainer without state gets it from others that train on, to their bits, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.errors import AnotherProcess, Gone, NotReady, PeerError, StaleGeneration
from shared.records import Mode, PserverMember
from shared.records.layout import Layout, OptimizerSpec
from shared.records.step import StepRecord
from shared.serving.data_plane.server import make_app
from shared.serving.data_plane.server import serving as served
from shared.serving.pserver import Pserver
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.simulation.compute import Speed, TinyCompute, Trace
from tests.trainer_agent.collective.test_replica import record
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state import catching_up, giving, serving
from trainer_agent.collective.state.catching_up import CatchingUp, Step
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.collective.state.messages import Portion, StateRequest
from trainer_agent.collective.state.serving import HttpDonor
from trainer_agent.model.flat import Place

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
    """Some blocks have none, in some steps; of parameters, where the rule needs them whole, all blocks have none then."""
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
        self.giver = StateGiver("j", self.compute, self.replica)
        self.dead, self.together = False, True
        self.delay_s: Callable[[StateRequest], float] = lambda _: 0.0
        self.spoil = 0
        self.asked = 0

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
            for replica, compute in ((self.replica, self.compute), (undisturbed.replica, undisturbed.compute)):
                replica.step(gradients(compute, version), record(version + 1))
                replica.swap()


@pytest.fixture(autouse=True)
def small_portions():
    """One block each, and then a pause."""
    with replaced(giving, "PORTION_BYTES", 1):
        yield


def run(scenario: Callable[[], Any]) -> Any:
    return run_virtually(scenario, shuffled=False)


def test_it_gets_the_bits_of_those_that_train_on_and_each_donor_gives_some():
    async def scenario() -> Job:
        job = Job()
        for member in job.members:
            member.delay_s = lambda _: 0.06  # more than a step
        await job.join()
        job.check()
        return job

    job = run(scenario)
    assert job.replica.version > 4
    assert all(member.asked for member in job.members)
    assert job.exchange.taken == job.exchange.released > 0


def test_a_donor_that_dies_meanwhile_costs_nothing_but_its_blocks_are_asked_for_elsewhere():
    async def scenario() -> None:
        job = Job()
        for member in job.members:
            member.delay_s = lambda _: 0.1
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, setattr, job.members[1], "dead", True)
        await job.join()
        job.check()

    run(scenario)


def test_without_any_donor_left_it_says_so():
    async def scenario() -> None:
        job = Job()
        for member in job.members:
            member.delay_s = lambda _: 0.3
        loop = asyncio.get_running_loop()
        for member in job.members:
            loop.call_later(0.5, setattr, member, "dead", True)
        with pytest.raises(NotReady, match=r"all of 3 donors are gone, . pieces are missing"):
            await job.join()
        assert job.replica.record is None

    run(scenario)


@pytest.mark.parametrize("checked", [True, False])
def test_a_damaged_block_is_fetched_again(checked):
    async def scenario() -> Job:
        job = Job()
        job.members[2].spoil = 1
        if checked:
            await job.join()
            job.check()
            return job
        with replaced(CatchingUp, "_check", lambda *_: None):
            await job.join()
        with pytest.raises(AssertionError):
            job.check()
        return job

    job = run(scenario)
    assert job.attempt.damaged == checked


@pytest.mark.parametrize("together", [True, False])
def test_whole_parameters_come_at_one_version_and_are_stepped_whole(together):
    """A donor gives one block at a time here. Without `together` the blocks of a parameter would never be of one version."""

    async def scenario() -> Job:
        job = Job(make=layerwise)
        for member in job.members:
            member.delay_s, member.together = (lambda _: 0.3), together
        if together:
            await job.join()
            job.check()
            return job
        with pytest.raises(TimeoutError):
            await job.join(2.0)
        return job

    job = run(scenario)
    assert job.exchange.taken > 4


@pytest.mark.parametrize("hurries", [True, False])
def test_where_versions_pass_too_fast_donors_hurry(hurries):
    async def scenario() -> Job:
        job = Job()
        for member in job.members:
            member.delay_s = lambda request: 0.4 / 2 ** (request.hurry if hurries else 0)
        with replaced(catching_up, "KEPT_BYTES", 0):
            if hurries:
                await job.join()
                job.check()
            else:
                with pytest.raises(TimeoutError):
                    await job.join(20.0)
        return job

    job = run(scenario)
    assert job.attempt.late > 0
    assert job.attempt.hurry >= 2


def test_gradients_that_are_kept_make_up_for_blocks_that_come_late():
    async def scenario() -> Job:
        job = Job()
        for member in job.members:
            member.delay_s = lambda _: 0.4
        await job.join()
        job.check()
        return job

    job = run(scenario)
    assert (job.attempt.late, job.attempt.hurry) == (0, 0)


def test_a_block_that_comes_behind_the_last_version_is_stepped_to_it():
    async def scenario() -> None:
        job = Job(members=1)
        (member,) = job.members
        member.delay_s = lambda _: 0.5
        attempt = asyncio.ensure_future(job.attempt.run())
        await asyncio.sleep(0.1)
        await member.step()  # and no other one follows
        async with asyncio.timeout(30.0):
            await attempt
        job.attempt.hand_over(job.replica)
        assert job.replica.version == 1
        job.check()

    run(scenario)


def test_who_cannot_keep_up_begins_anew():
    async def scenario() -> None:
        job = Job()
        for member in job.members:
            member.delay_s = lambda _: 0.3
        job.exchange.slow_s = 0.5
        with pytest.raises(Gone, match="is not kept"):
            await job.join()

    run(scenario)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_copied_while_a_step_changes_the_state(waits):
    async def scenario() -> bool:
        member = Member("a")
        await member.step()
        stepping = asyncio.ensure_future(member.step())
        await asyncio.sleep(0.001)
        request = StateRequest(**ENVELOPE, timeline=0, blocks=(0,))
        at_rest = property(lambda replica: replica.record is not None)
        with replaced(Replica, "at_rest", Replica.at_rest if waits else at_rest):
            portion = await member.giver.give(request)
        await stepping
        alone = Member("u")
        for _ in range(portion.head.record.version):
            await alone.step()
        fresh = await alone.giver.give(request)
        return [part.digest for part, _ in portion.parts] == [part.digest for part, _ in fresh.parts]

    assert run(scenario) is waits


async def test_over_http_the_same_comes_and_errors_are_those_of_the_giver():
    """Over a real socket; another incarnation is refused."""
    member = Member("a")
    await member.step()
    app = make_app(Pserver("j", "a"))
    serving.add_route(app, lambda: member.giver)
    async with served(app, "127.0.0.1", 0) as bound:
        there = PserverMember(index=-1, url=f"http://127.0.0.1:{bound.port}", incarnation="a", host="h", pid=1)
        donor = HttpDonor(there)
        with replaced(giving, "PORTION_BYTES", 1 << 20):
            request = StateRequest(**ENVELOPE, timeline=0, blocks=tuple(range(7)))
            found, expected = await donor.state(request), await member.giver.give(request)
            assert found.head.record == expected.head.record
            assert [(part, bytes(payload)) for part, payload in found.parts] == [
                (part, bytes(payload)) for part, payload in expected.parts
            ]
        with pytest.raises(StaleGeneration, match="parameters of timeline 7 were asked for"):
            await donor.state(request.model_copy(update={"timeline": 7}))
        await donor.close()
        other = HttpDonor(there.model_copy(update={"incarnation": "b"}))
        with pytest.raises(AnotherProcess):
            await other.state(request)
        await other.close()


def test_parameters_of_another_timeline_are_not_given():
    async def scenario() -> None:
        member = Member("a")
        with pytest.raises(StaleGeneration, match="parameters of timeline 7 were asked for"):
            await member.giver.give(StateRequest(**ENVELOPE, timeline=7, blocks=(0,)))
        with replaced(giving, "WAIT_S", 0.1), pytest.raises(NotReady, match="version 3 was asked for"):
            await member.giver.give(StateRequest(**ENVELOPE, timeline=0, blocks=(0,), at_least=3))

    run(scenario)
