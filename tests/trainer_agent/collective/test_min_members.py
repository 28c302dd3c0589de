"""A collective job waits while fewer than min_members trainers have the parameters; who comes then does not
begin it anew."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.waiting import until
from tests.trainer_agent.collective.cluster import CollectiveCluster, cluster
from tests.trainer_agent.scripts import spec_for, write_script
from trireme_shared.protocol.records import Phase, Strategy, TrainerMember

WAITS_S = 0.5


@pytest.fixture
def spec(tmp_path):
    common = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 100}
    return spec_for(
        write_script(tmp_path), strategy=Strategy.COLLECTIVE, pservers=0, trainers=2, min_members=2, **common
    )


async def waiting(made: CollectiveCluster) -> int:
    """Below min_members. The version that the one who is left has."""
    await made.version(3)
    await made.kill("trainer-1-x")
    await until(lambda: made.directory.state.phase is Phase.WAITING, "the job to wait", 10.0)
    await asyncio.sleep(WAITS_S)
    return made.shares["trainer-0-x"].store.has


async def test_no_step_is_made_by_too_few_and_a_new_trainer_does_not_offer_the_first_values(spec):
    async with cluster(spec, 2) as made:
        version = await waiting(made)
        made.add_trainer("trainer-2-x")
        key = made.directory.keys.trainer("trainer-2-x")
        for _ in range(10):
            if (found := await made.etcd.get(key)) is not None:
                said = TrainerMember.model_validate_json(found.value).holds
                assert said is None or said.version > 0, "it says that it has what the job began with"
            await asyncio.sleep(WAITS_S / 10)
        assert (
            made.shares["trainer-0-x"].store.has - version <= 1 or made.directory.state.phase is Phase.RUNNING
        )
        assert made.running["trainer-0-x"].done() is False
