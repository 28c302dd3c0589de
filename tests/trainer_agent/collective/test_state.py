"""Trainers of a collective job join, die and come back while it trains, and it changes its strategy between
runs: always the same bits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.trainer_agent.collective.cluster import CollectiveCluster, cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.collective import mean_blocks
from trainer_agent.collective.state import giving
from trireme_shared.protocol.records import JobSpec, Phase, Strategy
from trireme_shared.protocol.records.checkpoints import CheckpointLatest

COMMON: dict[str, Any] = {
    "lanes": 4,
    "global_batch_size": 12,
    "records_per_task": 6,
    "epochs": 10,
    "block_bytes": 256,
}
STEPS = 60
A, B, C, D = "trainer-0-x", "trainer-1-x", "trainer-2-x", "trainer-3-x"


@pytest.fixture(autouse=True)
def small_portions():
    with replaced(giving, "PORTION_BYTES", 1):
        yield


def spec_of(tmp_path: Any, folder: str = "job", **given: Any) -> JobSpec:
    strategy = {"strategy": Strategy.COLLECTIVE, "pservers": 0, **COMMON, **given}
    return spec_for(write_script(tmp_path), **strategy, storage=str(tmp_path / folder))


async def listed(made: CollectiveCluster, name: str) -> None:
    """The others train on meanwhile, but not to the job's end."""
    made.last_step = STEPS - 10
    await made.directory.wait_for(lambda view: name in view.trainers, 20.0, f"{name} is a member")
    made.last_step = math.inf


async def undisturbed(tmp_path: Any, **given: Any) -> dict[str, torch.Tensor]:
    return await trained(spec_of(tmp_path, "undisturbed", **given))


async def completed(made: CollectiveCluster) -> dict[str, torch.Tensor]:
    state = await made.ended()
    assert state.phase is Phase.COMPLETED, state
    return made.exported()


async def test_a_trainer_that_joins_gets_the_state_while_the_others_train_on(tmp_path):
    async with cluster(spec_of(tmp_path), 2) as made:
        made.portion_s = 0.005
        await made.version(2)
        made.add_trainer(C)
        await listed(made, C)
        assert sum(made.given.values()) > 8
        assert len(made.given) == 2
        await made.kill(A)  # its lanes go on from what the new one has
        await made.kill(B)
        found = await completed(made)
    assert differing(found, await undisturbed(tmp_path)) == []


async def test_a_trainer_that_is_asked_for_the_last_version_while_it_joins_waits_until_it_has_one(tmp_path):
    async with cluster(spec_of(tmp_path, lanes=1), 1) as made:
        made.portion_s, made.last_step = 0.02, 3
        await made.version(3)
        joiner = made.add_trainer(C).collective
        assert joiner is not None
        async with asyncio.timeout(20.0):
            while joiner.group.means.store is None:
                await asyncio.sleep(0.001)
        assert joiner.group.replica.record is None
        async with asyncio.timeout(20.0):
            record = await joiner.group.pull(None, exact=True)  # as before an evaluation
        assert record is not None
        assert record.version >= 3


@pytest.mark.soak
async def test_a_donor_may_die_meanwhile(tmp_path):
    async with cluster(spec_of(tmp_path), 2) as made:
        made.portion_s, made.last_step = 0.01, STEPS - 10
        await made.version(2)
        made.add_trainer(C)
        async with asyncio.timeout(20.0):
            while len(made.given) < 2:
                await asyncio.sleep(0.001)
        await made.kill(A)
        await listed(made, C)
        await made.kill(B)
        found = await completed(made)
    assert differing(found, await undisturbed(tmp_path)) == []


async def latest(made: CollectiveCluster) -> CheckpointLatest | None:
    found = await made.etcd.get(made.keys.latest)
    return CheckpointLatest.model_validate_json(found.value) if found else None


async def saved(made: CollectiveCluster, step: int) -> None:
    async with asyncio.timeout(20.0):
        while (there := await latest(made)) is None or there.step < step:
            await asyncio.sleep(0.005)


@pytest.mark.soak
async def test_if_all_die_new_ones_go_on_from_the_last_checkpoint(tmp_path):
    async with cluster(spec_of(tmp_path, checkpoint_every_steps=3), 2) as made:
        await saved(made, 3)
        await made.kill(A)
        await made.kill(B)
        made.add_trainer(C)
        made.add_trainer("trainer-3-x")
        found = await completed(made)
        await saved(made, STEPS)  # trainers that are done wait for it before they leave
        there = await latest(made)
        assert there is not None
        assert there.final
        assert there.timeline > 0
    assert differing(found, await undisturbed(tmp_path)) == []


async def test_who_does_not_reach_the_storage_in_a_roll_back_gets_everything_from_those_who_do(tmp_path):
    async def away() -> None:
        raise ConnectionRefusedError("no route to the storage")

    async with cluster(spec_of(tmp_path, checkpoint_every_steps=3, keep_checkpoints=100), 2) as made:
        await saved(made, 3)
        await made.kill(A)
        await made.kill(B)
        made.storages[D] = away
        made.last_step = STEPS - 10
        made.add_trainer(C)
        made.add_trainer(D)
        await listed(made, D)
        found = await completed(made)
    assert differing(found, await undisturbed(tmp_path)) == []


@pytest.mark.soak
async def test_a_spare_keeps_up_and_takes_over_at_once(tmp_path):
    async with cluster(spec_of(tmp_path, lanes=1), 2) as made:
        await listed(made, B)
        await made.version(5)
        place = [made.directory.trainers.places[name] for name in (A, B)]
        owner, spare = (A, B) if place[0] == 0 else (B, A)
        given = dict(made.given)
        await made.kill(owner)
        found = await completed(made)
        assert made.given == given  # nothing had to be fetched
        assert made.agents[spare].done.steps > 0
    assert differing(found, await undisturbed(tmp_path, lanes=1)) == []


async def test_the_last_version_is_not_lost_with_who_made_it(tmp_path):
    """Training is not over before all have it: nobody would make it again."""
    given = {"lanes": 1, "epochs": 2}
    async with cluster(spec_of(tmp_path, "undisturbed", **given), 1) as made:
        expected = await completed(made)
        store = made.shares[A].store
        assert store is not None
        last = store.has
    async with cluster(spec_of(tmp_path, **given), 2) as made:
        made.last_step = made.last_given = last - 1
        await made.directory.wait_for(lambda view: len(view.trainers.names) == 2, 20.0, "both are members")
        owner = made.directory.trainers.names[0]
        await made.version(last)
        await asyncio.sleep(0.2)
        await made.kill(owner)
        made.last_given = math.inf
        found = await completed(made)
    assert differing(found, expected) == []


@asynccontextmanager
async def without_processor(made: CollectiveCluster, name: str, steps: int) -> AsyncIterator[None]:
    """The others make so many steps meanwhile."""
    member = made.agents[name].collective
    assert member is not None
    async with member.group.in_use:
        made.last_step = member.group.means.has + steps
        await made.version(member.group.means.has + steps)
        yield
    made.last_step = math.inf


@pytest.mark.parametrize("kept_bytes", [mean_blocks.KEPT_BYTES, 0])
async def test_a_spare_that_was_behind_goes_on_from_where_it_was(tmp_path, kept_bytes):
    """Without older versions it gets everything anew."""
    with replaced(mean_blocks, "KEPT_BYTES", kept_bytes):
        async with cluster(spec_of(tmp_path, lanes=2), 3) as made:
            await listed(made, C)
            given = dict(made.given)
            async with without_processor(made, made.directory.trainers.names[2], 5):
                pass
            await completed(made)
    assert (made.given == given) is (kept_bytes > 0)


async def test_a_spare_that_gets_lanes_while_it_is_behind_makes_all_versions_before_it_computes(
    tmp_path, monkeypatch
):
    async with cluster(spec_of(tmp_path, lanes=2), 3) as made:
        await listed(made, C)
        first, _, spare = made.directory.trainers.names
        given, begun, member = dict(made.given), list[int](), made.agents[spare].collective
        assert member is not None

        async def beginning(step: int) -> None:
            begun.append(step)

        monkeypatch.setattr(member.group, "begin_step", beginning)
        before = member.group.means.has
        async with without_processor(made, spare, 5):
            await made.kill(first)
            await made.directory.wait_for(lambda view: spare in view.trainers.owners, 20.0, "it has lanes")
        found = await completed(made)
        assert made.given == given
        assert min(begun) >= before + 5
    assert differing(found, await undisturbed(tmp_path, lanes=2)) == []
