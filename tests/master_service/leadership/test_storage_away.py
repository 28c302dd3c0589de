"""A master that takes over while the job's storage is out of reach decides nothing about the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from master_service.storage.job_storage import FileStorage
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, done, leading, running, spec_of, take
from tests.master_service.storage.away import unreachable
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.datasets import TextLines


class OnFiles(MasterCluster):
    """Masters with the product's own storage."""

    def master_options(self) -> dict[str, Any]:
        # real files in real time: a machine that stands still for three seconds, the default lease, must not
        # end a term
        return {**super().master_options(), "storage": FileStorage, "ttl_s": 10.0}

    async def stored_state(self) -> JobState:
        found = await self.etcd.get(KEYS.state)
        assert found is not None
        return JobState.model_validate_json(found.value)


AWAY = [ConnectionError("no answer"), OSError(116, "Stale file handle"), PermissionError("no credentials")]


@pytest.mark.parametrize("error", AWAY, ids=repr)
async def test_storage_out_of_reach_at_a_take_over_is_tried_again_and_fails_no_job(
    tmp_path: Path, error: OSError
) -> None:
    (tmp_path / "train.txt").write_text("line\n" * 40)
    cluster = OnFiles(spec_of(dataset=TextLines(str(tmp_path / "train.txt")), storage="away://job"))
    async with running(cluster, "t1") as first:
        task = await take(cluster, first)
    second, stopping = cluster.master("m2"), asyncio.Event()
    with unreachable(error):
        serving = asyncio.ensure_future(second.run(stopping))
        await asyncio.sleep(0.8)
        during = await cluster.stored_state()
    try:
        assert (during.phase, serving.done()) == (Phase.RUNNING, False)
        await until(lambda: second.current_term is not None, "the second master to lead", 10)
        await second.complete_task(task.task_id, done(task))
        assert second.job.training.counts == (3, 0, 1, 0)
    finally:
        stopping.set()
        await serving


def cut_off(storage: Path) -> None:
    for table in storage.iterdir():
        table.write_bytes(table.read_bytes()[:-20])


def remove(storage: Path) -> None:
    for table in storage.iterdir():
        table.unlink()


@pytest.mark.parametrize("lose", [remove, cut_off])
async def test_a_file_table_that_is_lost_at_a_take_over_is_counted_again(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    (tmp_path / "train.txt").write_text("line\n" * 40)
    storage = tmp_path / "storage"
    cluster = OnFiles(spec_of(dataset=TextLines(str(tmp_path / "train.txt")), storage=str(storage)))
    async with running(cluster, "t1") as first:
        task = await take(cluster, first)
    lose(storage)
    async with leading(cluster.master("m2")) as second:
        await second.complete_task(task.task_id, done(task))
        assert second.job.training.counts == (3, 0, 1, 0)
    async with leading(cluster.master("m3")) as third:
        assert third.job.training.counts == (3, 0, 1, 0)


async def test_a_dataset_that_is_out_of_reach_when_it_is_counted_again_fails_no_job(tmp_path: Path) -> None:
    with fsspec.open("away://data/train.txt", "wb") as file:
        file.write(b"line\n" * 40)
    storage = tmp_path / "storage"
    cluster = OnFiles(spec_of(dataset=TextLines("away://data/train.txt"), storage=str(storage)))
    async with running(cluster, "t1"):
        pass
    remove(storage)
    second, stopping = cluster.master("m2"), asyncio.Event()
    with unreachable(ConnectionError("no answer")):
        serving = asyncio.ensure_future(second.run(stopping))
        await asyncio.sleep(0.8)
        during = await cluster.stored_state()
    try:
        assert (during.phase, serving.done()) == (Phase.RUNNING, False)
        await until(lambda: second.current_term is not None, "the second master to lead", 10)
        assert second.job.state.phase is Phase.RUNNING
    finally:
        stopping.set()
        await serving


async def test_a_dataset_that_is_gone_when_it_is_counted_again_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("line\n" * 40)
    storage = tmp_path / "storage"
    cluster = OnFiles(spec_of(dataset=TextLines(str(tmp_path / "train.txt")), storage=str(storage)))
    async with running(cluster, "t1"):
        pass
    remove(storage)
    (tmp_path / "train.txt").unlink()
    async with leading(cluster.master("m2")) as second:
        assert second.job.state.phase is Phase.FAILED
        assert "does not exist" in second.job.state.reason
