"""What many jobs leave behind: python -m benchmarks.jobs_memory [--jobs 100] [--seconds 120] [--waves 2]
[--json]

`trireme up` starts a pool of --trainers and --pservers places: a real master, a real etcd, and real members
with a tiny model whose minibatches sleep. Each wave submits --jobs jobs at once, waits until all have ended,
and deletes them. A job has one trainer and one parameter server and trains for about --seconds. Every job
must be COMPLETED, started once, with each record trained as often as it has epochs.

    master      resident memory of the leader: before, the most, after the deletion
    etcd keys   and what they take in its file after a compaction (`live`); `file`: the file itself, which
                never shrinks by itself: its free pages are used again
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.dispatch import memory_mib
from benchmarks.measurements import clean_environment
from trireme.client import AsyncClient, CreateJob
from trireme.launch.processes import PYTHON_MODULE
from trireme.pool import cluster_folder
from trireme.view.job_address import client_of
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.errors import Compacted
from trireme_shared.platform.etcd.operations import STATUS
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import NotReady, TriremeError
from trireme_shared.protocol.records.cluster import Source
from trireme_shared.protocol.records.datasets import Npy
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest import JobView

RECORDS, BATCH = 64, 8
LOOK_S = 1.0
START_S = 120.0
JOB_S = 60.0  # beyond its training: start, checkpoint, export, on a busy machine
KIB = 1024
SCRATCH, COMMITS = "/benchmark/scratch", 3  # etcd frees the pages of old revisions with its next commits
SCRIPT = """
import time

import torch
import trireme
from torch import nn
from torch.nn import functional as F


def model():
    return nn.Linear(8, 1)


def dataset():
    return trireme.data.Npy({data!r})


def loss(model, batch):
    time.sleep({sleep_s!r})
    return F.mse_loss(model(batch["x"])[:, 0], batch["x"][:, 0])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
"""


@dataclass(frozen=True)
class Look:
    """MiB of the master, keys below the cluster's prefix, KiB of etcd's file and of what is in use of it."""

    master_mib: float
    keys: int
    live_kib: float
    file_kib: float


@dataclass(frozen=True)
class Wave:
    """`peak_mib`, `peak_keys`: the most that was seen of the master and of keys."""

    jobs: int
    seconds: float
    before: Look
    peak_mib: float
    peak_keys: int
    ended: Look
    after: Look
    wrong: tuple[str, ...]


class Cluster:
    """`trireme up`, as `started` made it."""

    def __init__(self, up: subprocess.Popen[bytes], client: AsyncClient, etcd: Etcd) -> None:
        self.client, self.etcd = client, etcd
        found = [
            each for each in psutil.Process(up.pid).children() if "master_service" in " ".join(each.cmdline())
        ]
        assert len(found) == 1, found
        self.master = found[0].pid

    async def keys(self) -> int:
        return (await self.etcd.range("/trireme/", prefix=True, count_only=True)).count

    async def look(self) -> Look:
        """After a compaction."""
        revision = (await self.etcd.range("/", prefix=True, count_only=True)).revision
        with suppress(Compacted):
            await self.etcd.compact(revision)
        for _ in range(COMMITS):
            await self.etcd.put(SCRATCH, b"")
            await self.etcd.delete(SCRATCH)
            await asyncio.sleep(LOOK_S / 2)
        status = await self.etcd.transport.call(STATUS, {}, START_S)
        keys = await self.keys()
        return Look(memory_mib(self.master), keys, status["dbSizeInUse"] / KIB, status["dbSize"] / KIB)


@asynccontextmanager
async def started(given: argparse.Namespace, folder: Path) -> AsyncIterator[Cluster]:
    """With all places in the pool. Raises TimeoutError."""
    counts = ["--trainers", str(given.trainers), "--pservers", str(given.pservers)]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*PYTHON_MODULE, "trireme", "up", *counts, "--data-dir", str(folder)],
            env=clean_environment(),
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(START_S):
            while (facts := cluster_folder.find(folder)) is None:
                if up.poll() is not None:
                    sys.exit((folder / "up.log").read_text())
                await asyncio.sleep(LOOK_S)
        etcd = etcd_client.connect([facts.etcd["etcd"]])
        async with client_of(facts.url, facts.token) as client:
            cluster = Cluster(up, client, etcd)
            async with asyncio.timeout(START_S):
                while (
                    len([each async for each in client.list_pool_members()]) < given.trainers + given.pservers
                ):
                    await asyncio.sleep(LOOK_S)
            yield cluster
        await etcd.close()
    finally:
        up.terminate()
        up.wait(START_S)


async def measure(given: argparse.Namespace, folder: Path) -> list[Wave]:
    np.save(folder / "x.npy", np.ones((RECORDS, 8), np.float32))
    steps = RECORDS // BATCH
    epochs = max(1, round(given.seconds / given.sleep / steps))
    data = str(folder / "x.npy")
    text = SCRIPT.format(data=data, sleep_s=given.sleep)
    settings = JobSettings(
        dataset=Npy(data),
        epochs=epochs,
        global_batch_size=BATCH,
        lanes=1,
        pservers=1,
        checkpoint_every_epochs=None,
    )
    request = {
        "settings": settings,
        "scheduling": {"max_trainers": 1},
        "source": Source(file_name="tiny.py", text=text),
    }
    async with started(given, folder) as cluster:
        return [await one_wave(cluster, given, number, request, epochs) for number in range(given.waves)]


async def one_wave(
    cluster: Cluster, given: argparse.Namespace, number: int, request: dict[str, Any], epochs: int
) -> Wave:
    names = [f"wave-{number}-job-{each}" for each in range(given.jobs)]
    before, begin = await cluster.look(), time.monotonic()
    peak_mib, peak_keys = before.master_mib, before.keys
    await asyncio.gather(
        *(cluster.client.create_job(CreateJob(**request, name=name), key=name) for name in names)
    )
    rounds = -(-given.jobs // min(given.trainers, given.pservers))
    async with asyncio.timeout(rounds * (given.seconds + JOB_S)):
        while True:
            jobs = {each.job: each async for each in cluster.client.list_jobs()}
            peak_mib, peak_keys = (
                max(peak_mib, memory_mib(cluster.master)),
                max(peak_keys, await cluster.keys()),
            )
            if all(jobs[name].end_time for name in names):
                break
            await asyncio.sleep(LOOK_S)
        wrong = [text for name in names if (text := await what_is_wrong(cluster, jobs[name], epochs))]
        ended = await cluster.look()
        for name in names:
            await delete(cluster.client, name)
    seconds = time.monotonic() - begin
    after = await cluster.look()
    return Wave(
        given.jobs, seconds, before, max(peak_mib, ended.master_mib), peak_keys, ended, after, tuple(wrong)
    )


async def what_is_wrong(cluster: Cluster, job: JobView, epochs: int) -> str:
    result = (await cluster.client.get_job(job.job)).result
    trained = result.trained_records if result else 0
    if (job.standing, job.starts, trained) == ("COMPLETED", 1, epochs * RECORDS):
        return ""
    return f"{job.job} is {job.standing} ({job.reason}), was started {job.starts} times, {trained} records"


async def delete(client: AsyncClient, name: str) -> None:
    """Its members may be leaving still."""
    while True:
        try:
            await client.wait_for_operation(name, (await client.delete_job(name, wait_s=30.0)).operation_id)
        except NotReady:
            await asyncio.sleep(LOOK_S / 5)
        else:
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0, help="that a job trains")
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--trainers", type=int, default=4, help="places")
    parser.add_argument("--pservers", type=int, default=4, help="places")
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a minibatch")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    with tempfile.TemporaryDirectory(prefix="trireme-jobs-memory-") as folder:
        try:
            waves = asyncio.run(measure(given, Path(folder)))
        except TriremeError as error:
            sys.exit(f"{error}\n{(Path(folder) / 'up.log').read_text()[-2000:]}")
    if given.json:
        print(json.dumps([asdict(wave) for wave in waves]))
    else:
        show(waves)
    if any(wave.wrong for wave in waves):
        sys.exit(1)


def show(waves: list[Wave]) -> None:
    print(
        "| wave | jobs | took | master before | most | all ended | deleted | keys before | most | "
        "deleted | etcd live | file |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for number, wave in enumerate(waves):
        print(
            f"| {number} | {wave.jobs} | {wave.seconds:.0f} s | {wave.before.master_mib:.1f} MiB | "
            f"{wave.peak_mib:.1f} "
            f"| {wave.ended.master_mib:.1f} | {wave.after.master_mib:.1f} | {wave.before.keys} | "
            f"{wave.peak_keys} "
            f"| {wave.after.keys} | {wave.before.live_kib:.0f}, {wave.ended.live_kib:.0f}, "
            f"{wave.after.live_kib:.0f} KiB "
            f"| {wave.before.file_kib:.0f}, {wave.ended.file_kib:.0f}, {wave.after.file_kib:.0f} KiB |"
        )
    for text in (text for wave in waves for text in wave.wrong):
        print(text)


if __name__ == "__main__":
    main()
