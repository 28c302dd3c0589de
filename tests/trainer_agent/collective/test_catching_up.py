"""A trainer without state gets it from others that train on, to their bits, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.trainer_agent.collective.joining_job import ENVELOPE, Job, Member, layerwise
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state import catching_up, giving
from trainer_agent.collective.state.catching_up import CatchingUp
from trainer_agent.collective.state.giving import HttpDonor
from trainer_agent.collective.state.messages import StateRequest
from trireme_shared.protocol.errors import AnotherProcess, Gone, NotReady, StaleGeneration
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.records.step import StepResult
from trireme_shared.serving.data_plane.server import make_app
from trireme_shared.serving.data_plane.server import serving as served
from trireme_shared.serving.pserver import Pserver


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


def test_it_gets_the_results_of_steps_before_that_may_not_be_stored_yet():
    """Who joins may report them, and save them with a checkpoint."""
    results = (StepResult(step=0, epoch=0, records=4), StepResult(step=1, epoch=0, records=4))

    async def scenario() -> Job:
        job = Job()
        for member in job.members:
            member.results = results
        await job.join()
        job.check()
        return job

    assert run(scenario).exchange.began.results == results


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
    """A donor gives one block at a time here. Without `together` the blocks of a parameter would never be of
    one version."""

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
    giving.add_route(app, lambda: member.giver)
    async with served(app, "127.0.0.1", 0) as bound:
        there = PserverMember(
            index=-1, url=f"http://127.0.0.1:{bound.port}", incarnation="a", host="h", pid=1
        )
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
