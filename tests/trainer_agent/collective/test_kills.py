"""Trainers of a collective job that die, at any moment, change no bit: the others have everything."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.trainer_agent.collective.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import Group
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.records import Phase, Strategy

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
        scheduler="def scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], 0.5)\n",
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
async def test_one_that_is_killed_in_the_middle_of_a_step_does_not_show_in_the_bits(
    tmp_path, script, pause_s
):
    undisturbed = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "a")), 2)
    async with cluster(spec_for(script, **COMMON, storage=str(tmp_path / "b")), 2) as made:
        await made.version(4)
        await asyncio.sleep(pause_s)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


async def test_a_trainer_whose_version_is_lost_while_its_loop_pulls_joins_anew(tmp_path, script, monkeypatch):
    """The master makes one more generation at once, which nobody may form before what this trainer had is
    forgotten; and its loop uses that."""
    undisturbed = await trained(spec_for(script, **COMMON, storage=str(tmp_path / "a")), 1)
    lost: list[int] = []
    form = MeanGradients.form

    async def form_or_lose(self: MeanGradients, group: Group) -> None:
        if not lost and killed and self.server is made.shares["trainer-1-x"]:
            lost.append(group.generation)
            raise Gone("no trainer of the generation has its version")
        await form(self, group)

    monkeypatch.setattr(MeanGradients, "form", form_or_lose)
    async with cluster(spec_for(script, **COMMON, storage=str(tmp_path / "b")), 3) as made:
        killed: list[str] = []
        made.last_step = 30
        await made.version(3)
        killed.append("trainer-2-x")
        await made.kill("trainer-2-x")
        share = made.shares["trainer-1-x"]
        async with asyncio.timeout(20):
            while not lost or share.store is None or share.store.has < 20:
                await asyncio.sleep(0.01)
        made.last_step = math.inf
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []
