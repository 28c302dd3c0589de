"""Trainers of a collective job that die, at any moment, change no bit: the others have everything."""

from __future__ import annotations

import asyncio

import pytest

from shared.records import Phase, Strategy
from tests.trainer_agent.collective.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script

COMMON = {
    "strategy": Strategy.COLLECTIVE,
    "pservers": 0,
    "lanes": 4,
    "global_batch_size": 12,
    "records_per_task": 6,
    "epochs": 4,
    "trainers": 3,
}


@pytest.fixture
def script(tmp_path):
    return write_script(
        tmp_path,
        scheduler="def scheduler(optimizer):\n    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], 0.5)\n",
    )


async def test_trainers_that_are_killed_one_after_the_other_do_not_show_in_the_bits(tmp_path, script):
    undisturbed = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "a")), 1)
    async with cluster(spec_for(script, **COMMON, storage=str(tmp_path / "b")), 3) as made:
        await made.version(3)
        await made.kill("trainer-0-x")  # owner of lane 0, in the middle of something
        await made.version(7)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.005])
async def test_one_that_is_killed_in_the_middle_of_a_step_does_not_show_in_the_bits(tmp_path, script, pause_s):
    undisturbed = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "a")), 2)
    async with cluster(spec_for(script, **COMMON, storage=str(tmp_path / "b")), 2) as made:
        await made.version(4)
        await asyncio.sleep(pause_s)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []
