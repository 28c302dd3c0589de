"""Trainers that exchange gradients among themselves train to the bits of parameter servers, and of one process."""

from __future__ import annotations

import pytest

from shared.records import Strategy
from tests.trainer_agent import cluster as with_pservers
from tests.trainer_agent.collective.cluster import trained
from tests.trainer_agent.scripts import differing, spec_for, train_plainly, write_script

COLLECTIVE = {"strategy": Strategy.COLLECTIVE, "pservers": 0}


async def test_one_trainer_gives_the_bits_of_plain_pytorch(tmp_path):
    script = write_script(tmp_path)
    spec = spec_for(script, **COLLECTIVE)
    assert differing(await trained(spec), train_plainly(script, spec)) == []


@pytest.mark.parametrize("trainers", [2, 3])
async def test_several_trainers_give_the_bits_of_parameter_servers(tmp_path, trainers):
    script = write_script(tmp_path)
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 2}
    servers = await with_pservers.trained(spec_for(script, **common, pservers=2, storage=str(tmp_path / "a")), 2)
    found = await trained(spec_for(script, **common, **COLLECTIVE, storage=str(tmp_path / "b")), trainers)
    assert differing(servers, found) == []
