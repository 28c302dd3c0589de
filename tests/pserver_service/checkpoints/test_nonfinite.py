"""Parameters that are NaN or infinite: their checkpoint takes the place of no good one, unless the job says
so."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.async_job import opened, push
from tests.pserver_service.checkpoints.cluster import KEYS, PserverCluster, folders, run_scenario
from trireme_shared.checkpoints import writer
from trireme_shared.protocol.records.checkpoints import OwnCheckpoints


def poison(cluster: PserverCluster, value: float) -> None:
    """One number at every parameter server, as an optimizer leaves it that diverges."""
    for store in cluster.stores:
        store.blocks[min(store.blocks)].current.tensor[-1] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_good_checkpoint_stays(tmp_path, value):
    async def scenario():
        cluster = PserverCluster(str(tmp_path))
        await cluster.open()
        good = await cluster.committed(0)
        poison(cluster, value)
        await cluster.train(0, 2)
        first = cluster.nodes[0].pserver
        await until(lambda: "step 2 " in first.checkpoint_error, "it is refused")
        assert "1 of 16 parameters in block." in first.checkpoint_error
        assert first.checkpoint_error.endswith(
            "the checkpoints before it stay; go back to the checkpoint before, with a lower learning rate; "
            "on_nonfinite = ignore saves such parameters"
        )
        assert await cluster.latest() == good
        cluster.check_latest(good)

    run_scenario(scenario)


def test_buffers_may_be_infinite():
    assert writer.parameters_of(parts.layout_of()) == [f"block.{number}" for number in range(10)]


def test_a_job_that_ignores_it_saves_it(tmp_path):
    async def scenario():
        cluster = PserverCluster(str(tmp_path), on_nonfinite="ignore")
        await cluster.open()
        await cluster.committed(0)
        poison(cluster, math.nan)
        await cluster.train(0, 2)
        assert (await cluster.committed(2)).step == 2

    run_scenario(scenario)


def test_an_independent_checkpoint_stays_too(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, checkpoint_kind="independent", checkpoint_every_seconds=1.0)
        await push(cluster, 0, 0)
        first = cluster.nodes[0].pserver
        key = KEYS.own_checkpoints(first.index)
        async with asyncio.timeout(60):
            while await cluster.etcd.get(key) is None:
                await asyncio.sleep(0.1)
        poison(cluster, math.inf)
        await until(lambda: "are NaN or infinite" in first.checkpoint_error, "it is refused")
        good = await cluster.etcd.get(key)
        await asyncio.sleep(5)
        assert (await cluster.etcd.get(key)).value == good.value
        assert {ref.uuid for ref in OwnCheckpoints.model_validate_json(good.value).kept} <= folders(tmp_path)

    run_scenario(scenario)
