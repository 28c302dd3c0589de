"""What a client of a masterless job reads from etcd."""

from __future__ import annotations

import asyncio

from shared.records import MetricBatch, StepMetrics
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.cluster import KEYS, spec_of
from tests.master_service.masterless.cluster import MasterlessCluster, dispatching
from trireme.view.masterless_client import MasterlessClient


def test_who_asks_later_sees_the_progress_that_was_told_before() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers, asyncio.TaskGroup() as group:
            share = StepMetrics(step=3, epoch=0, loss_sum=6.0, records=4)
            await dispatchers["t2"].report_metrics(MetricBatch(trainer="t2", steps=(share,)))
            await asyncio.sleep(5)
            late = MasterlessClient(cluster.etcd, KEYS, storage=lambda _: cluster.storage)
            following = group.create_task(late.run())
            await late.ready(10)
            progress = (await late.job())["progress"]
            assert (progress["step"], progress["loss"]) == (4, 1.5)
            following.cancel()

    run_virtually(main)
