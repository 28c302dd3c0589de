"""The plan of an epoch in etcd, what is told of it once, and jobs that another version began."""

from __future__ import annotations

import asyncio
import json

from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.cluster import KEYS, MasterCluster, Storage, leading, spec_of
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records import EpochPlan, Mode
from trireme_shared.protocol.records.datasets import Dataset

FILES = tuple(TableFile(f"f{n}", count) for n, count in enumerate((480, 479, 479)))


class ThreeFiles(Storage):
    """`sizes`: with which it was counted. It forgets tables."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[TaskSizes] = []

    async def count(self, source: Dataset, sizes: TaskSizes) -> FileTable:
        self.sizes.append(sizes)
        table = sizes.table(FILES)
        return FileTable(table.files, table.task_records, f"digest {table.task_records}", table.left_out)

    async def load_table(self, digest: str) -> FileTable:
        raise NotFound("gone")


def job_of(**values: object) -> MasterCluster:
    spec = spec_of(mode=Mode.SYNC, lanes=8, global_batch_size=256, **({"records_per_task": None} | values))
    return MasterCluster(spec, ThreeFiles())


async def value(cluster: MasterCluster, key: str) -> bytes:
    found = await cluster.etcd.get(key)
    assert found is not None
    return found.value


def names(master) -> list[str]:
    return [event.name for event in master.events.after(0, 100)]


def test_members_find_the_plan_and_rest_tells_the_steps() -> None:
    async def main() -> None:
        cluster = job_of(epochs=5)
        async with leading(cluster.master()) as master:
            plan = EpochPlan(records=1438, tasks=15, task_records=96, steps=6)
            assert EpochPlan.model_validate_json(await value(cluster, KEYS.plan)) == plan == master.job.plan
            told = master.job.summary()
            assert (told.task_records, told.steps_per_epoch, told.total_steps, told.records_left_out) == (
                96,
                6,
                30,
                0,
            )
            assert "steps_are_short" not in names(master)

    run_virtually(main)


def test_short_steps_and_what_is_left_out_are_told_once_though_masters_change() -> None:
    async def main() -> None:
        cluster = job_of(records_per_task=512, drop_last=True)
        for name in ("m1", "m2"):
            async with leading(cluster.master(name)) as master:
                assert names(master).count("steps_are_short") == names(master).count("records_left_out") == 1
                await asyncio.sleep(0.5)  # virtual: they are written
                assert master.job.summary().records_left_out == 62

    run_virtually(main)


def test_a_job_keeps_its_task_size_though_its_table_is_lost_and_its_trainers_are_others() -> None:
    async def main() -> None:
        cluster = job_of()
        async with leading(cluster.master()):
            pass
        cluster.spec = cluster.spec.model_copy(update={"trainers": 7})
        async with leading(cluster.master("m2")) as master:
            assert master.job.plan.task_records == 96
        assert [sizes.fixed for sizes in cluster.storage.sizes] == [None, 96]

    run_virtually(main)


def test_a_job_of_an_earlier_version_keeps_its_tasks_and_their_order() -> None:
    async def main() -> None:
        cluster = job_of(records_per_task=None)
        async with leading(cluster.master()):
            pass
        meta = json.loads(await value(cluster, KEYS.task_meta))
        for name in ("task_records", "evaluation_task_records", "balanced"):
            del meta[name]
        old = meta | {"digest": "digest 512", "tasks": 3}
        await cluster.etcd.put(KEYS.task_meta, json.dumps(old).encode())
        await cluster.etcd.delete(KEYS.plan)
        async with leading(cluster.master("m2")) as master:
            assert (master.job.plan.task_records, master.job.plan.tasks) == (512, 3)
            assert not master.job.training.streams.balanced
            assert not master.job.meta.balanced
            assert EpochPlan.model_validate_json(await value(cluster, KEYS.plan)) == master.job.plan

    run_virtually(main)
