"""What a client of a masterless job reads from etcd."""

from __future__ import annotations

import asyncio

from tests.equipment.virtual_loop import run_virtually
from tests.master_service.cluster import KEYS, spec_of, take
from tests.master_service.masterless.cluster import MasterlessCluster, dispatching
from trireme.view.masterless_client import MasterlessClient
from trireme_shared.protocol.records import FailTask, MetricBatch, StepMetrics, UserFailure

NO = UserFailure(error_type="ValueError", message="no")


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
            progress = (await late.get_job(KEYS.job)).progress
            assert (progress.step, progress.loss) == (4, 1.5)
            following.cancel()

    run_virtually(main)


def test_the_events_of_a_masterless_job_are_the_log_that_its_trainers_write() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers, asyncio.TaskGroup() as group:
            client = MasterlessClient(cluster.etcd, KEYS, storage=lambda _: cluster.storage)
            following = group.create_task(client.run())
            await client.ready(10)
            first = await client.list_events(KEYS.job)
            assert [event.name for event in first.events] == [
                "sweeper_elected",
                "setting_unused",
                "job_running",
            ]
            helper = next(each for each in dispatchers.values() if not each.sweeps)
            given = await take(cluster, helper, helper.name)
            failed = FailTask(trainer=helper.name, attempt=given.attempt, epoch=0, failure=NO)
            await helper.fail_task(given.task_id, failed)  # its own decision, in its own transaction
            page = await client.list_events(KEYS.job, after=first.next_after, wait_s=10)
            assert [(event.name, event.event_id) for event in page.events] == [
                ("task_requeued", first.newest + 1)
            ]
            following.cancel()

    run_virtually(main)
