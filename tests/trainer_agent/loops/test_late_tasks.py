"""A trainer that hangs at the end of an asynchronous epoch: another one gets its task too, and each minibatch
counts once."""

from __future__ import annotations

import asyncio

import pytest

from master_service.core.changes import Decision
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import RECORDS, spec_for, write_script
from trireme_shared.protocol.records import Mode, Phase

HANGS = "trainer-1-x"
TASKS, MINIBATCHES = 12, 24  # of 5 records, 3 and 2 a minibatch


def spec_of(script, **values):
    fields = {"mode": Mode.ASYNC, "epochs": 1, "global_batch_size": 3, "records_per_task": 5, "pservers": 2}
    return spec_for(script, **fields, **values)


def hang_in_its_task(made, hangs: asyncio.Event, goes_on: asyncio.Event) -> None:
    """From the second minibatch of its second task on: what it has pushed of it already must not count
    again."""
    compute = made.computes[HANGS]
    original, begun = compute.gradient, 0

    async def gradient(*arguments):
        nonlocal begun
        begun += 1
        if begun == 4:
            hangs.set()
            await goes_on.wait()
        return await original(*arguments)

    compute.gradient = gradient


def slow_down(made, name: str) -> None:
    """So that the other one gets tasks, too."""
    compute = made.computes[name]
    original = compute.gradient

    async def gradient(*arguments):
        await asyncio.sleep(0.02)
        return await original(*arguments)

    compute.gradient = gradient


async def one_hangs(made) -> asyncio.Event:
    """When it does so, what lets it go on."""
    hangs, goes_on = asyncio.Event(), asyncio.Event()
    hang_in_its_task(made, hangs, goes_on)
    slow_down(made, "trainer-0-x")
    await asyncio.wait_for(hangs.wait(), 50)
    return goes_on


async def ledgers(made):
    found = [ledger for pserver in made.pservers for ledger in (await pserver.info()).ledger]
    return [(ledger.applied_lowest, ledger.applied_highest, ledger.tasks_open) for ledger in found]


async def counted_losses(made) -> int:
    """As when a parameter server is back: the generation that begins then, once trainers know of it."""

    def back(job, _now) -> Decision[int]:
        generation = job.state.generation + 1
        return Decision(generation, (job.state.with_fields(generation=generation, mended=generation),))

    generation = await made.master.writer.decide(back)
    await made.directory.wait_for(lambda view: view.known_state.mended == generation, 10.0, "the generation")
    return generation


def given_twice(made):
    return [event for event in made.master.events.after(0, 1000) if event.name == "task_given_twice"]


def only_its_tasks_are_left(made) -> bool:
    todo, pending, _, _ = made.master.job.training.counts
    held = made.master.job.training.pending.values()
    return todo == 0 < pending and all(task.record.is_at(HANGS) for task in held)


@pytest.mark.parametrize("push_every", [1, 2])
async def test_the_tasks_of_a_trainer_that_hangs_at_the_end_of_an_epoch_are_done_by_another(
    tmp_path, push_every
):
    spec = spec_of(write_script(tmp_path), push_every=push_every)
    async with cluster(spec, 2) as made:
        hangs, goes_on = asyncio.Event(), asyncio.Event()
        hang_in_its_task(made, hangs, goes_on)
        slow_down(made, "trainer-0-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert hangs.is_set()
        assert not goes_on.is_set(), "it hangs still"
        assert made.directory.state.result.trained_records == RECORDS
        assert await ledgers(made) == [(MINIBATCHES, MINIBATCHES, 0)] * spec.pservers
        found = given_twice(made)
        assert found
        assert {(event.fields["late"], event.fields["trainer"]) for event in found} == {
            (HANGS, "trainer-0-x")
        }
        assert len({event.fields["task"] for event in found}) == len(found) <= 2, (
            "the one it trains and the one it fetched ahead"
        )


async def test_a_trainer_that_goes_on_after_its_task_was_done_by_another_changes_nothing(tmp_path):
    spec = spec_of(write_script(tmp_path), push_every=1).model_copy(update={"epochs": 2})
    async with cluster(spec, 2) as made:
        goes_on = await one_hangs(made)
        async with asyncio.timeout(50):
            while made.master.job.training.current < 1:
                await asyncio.sleep(0.01)
        goes_on.set()
        assert (await made.ended()).phase is Phase.COMPLETED
        assert given_twice(made)
        assert made.directory.state.result.trained_records == 2 * RECORDS
        assert await ledgers(made) == [(MINIBATCHES, MINIBATCHES, 0)] * 2 * spec.pservers


async def test_a_task_that_was_done_when_a_pserver_came_back_is_pushed_no_more_by_who_was_overtaken(tmp_path):
    """It counted as lost there, and the parameter server had it all the same."""
    spec = spec_of(write_script(tmp_path), push_every=1).model_copy(update={"epochs": 2})
    async with cluster(spec, 2) as made:
        goes_on = await one_hangs(made)
        async with asyncio.timeout(50):
            while made.master.job.training.current < 1:
                await asyncio.sleep(0.01)
        generation = await counted_losses(made)
        for pserver in made.pservers:
            pserver.generation = generation
        goes_on.set()
        assert (await made.ended()).phase is Phase.COMPLETED
        assert await ledgers(made) == [(MINIBATCHES, MINIBATCHES, 0)] * 2 * spec.pservers
        of_the_first_epoch = [(await pserver.info()).ledger[0] for pserver in made.pservers]
        assert [ledger.duplicates for ledger in of_the_first_epoch] == [0] * spec.pservers


async def test_with_stragglers_off_the_epoch_waits_for_the_trainer_that_hangs(tmp_path):
    spec = spec_of(write_script(tmp_path), stragglers="off")
    async with cluster(spec, 2) as made:
        goes_on = await one_hangs(made)

        async with asyncio.timeout(50):
            while not only_its_tasks_are_left(made):
                await asyncio.sleep(0.01)
        await asyncio.sleep(2.5)
        assert only_its_tasks_are_left(made)
        assert not given_twice(made)
        goes_on.set()
        assert (await made.ended()).phase is Phase.COMPLETED
        assert await ledgers(made) == [(MINIBATCHES, MINIBATCHES, 0)] * spec.pservers
