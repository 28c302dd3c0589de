"""A job that the launcher runs as real processes, slow enough to be disturbed; what it trained, to compare
bit for bit."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.end_to_end.scripts import EVALUATION, LOSS, RECORDS, write_script
from tests.equipment.forked import warm_server
from tests.equipment.replaced import replaced
from trireme.launch import processes
from trireme.launch.cluster import LocalCluster
from trireme.launch.processes import ForkServer, inherited_environment
from trireme.launch.supervision import ClusterSettings
from trireme.view.job_address import client_of
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records import JobSpec, JobState, Phase
from trireme_shared.protocol.records.datasets import Npy

EPOCHS = 10
STEPS = EPOCHS * RECORDS // 32
END_S = 300.0  # on a busy machine
FAST_S = 0.002


def slowable_loss(slow: Path, slow_s: float) -> str:
    """A minibatch takes `slow_s` seconds more while the file `slow` exists: few steps last until everything
    is done to the job."""
    sleeps = f'    time.sleep({slow_s} if Path("{slow}").exists() else {FAST_S})\n    return'
    return LOSS.replace("    return", sleeps).replace("\ndef", "import time\n\n\ndef")


def spec_of(folder: Path, *, slow_s: float = 0.03, **changes) -> JobSpec:
    """Slow until `ended` or `completed` is called."""
    (folder / "data").mkdir(exist_ok=True)
    slow = folder / "data" / "slow"
    slow.touch()
    script = write_script(folder / "data", loss=slowable_loss(slow, slow_s), evaluation=EVALUATION)
    files = [str(folder / "data" / name) for name in ("x.npy", "y.npy")]
    settings = {
        "job": "faults",
        "script": str(script),
        "dataset": Npy(*files, aligned=True),
        "evaluation_dataset": Npy(*files, aligned=True),
        "storage": str(folder / "run"),
        "epochs": EPOCHS,
        "global_batch_size": 32,
        "lanes": 4,
        "seed": 3,
        "records_per_task": 16,
        "block_bytes": 256,
        "trainers": 2,
        "pservers": 2,
    }
    return JobSpec.model_validate({**settings, **changes})


async def evaluations(cluster: LocalCluster) -> list[Evaluation]:
    """Those while it trained."""
    found = await cluster.etcd.range(cluster.directory.keys.evaluations, prefix=True)
    return [Evaluation.model_validate_json(kv.value) for kv in found.kvs]


FORK_SERVERS = ExitStack()


@cache
def fork_server_for(_: frozenset[tuple[str, str]]) -> ForkServer:
    """For all jobs of this session; forked itself, with its imports done."""
    forks = FORK_SERVERS.enter_context(ForkServer())
    with replaced(processes, "start_server", warm_server().start_server):
        forks.prepare()
    return forks


@asynccontextmanager
async def cluster_of(spec: JobSpec, folder: Path, spare_pservers: int = 0, **settings):
    """A running job, with these ClusterSettings; `cluster.deaths` counts its children's deaths by name."""
    deaths: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as changed:
        changed.delenv("PYTEST_CURRENT_TEST", raising=False)  # one fork server serves one environment
        cluster = LocalCluster(
            spec,
            folder / "run",
            ClusterSettings(**settings),
            spare_pservers=spare_pservers,
            forks=fork_server_for(frozenset(inherited_environment().items())),
            on_event=lambda event: deaths.update(
                [event.child] if event.what in ("died", "lost_lease", "left") else []
            ),
        )
        cluster.deaths = deaths
        async with cluster:
            yield cluster
    assert not any(child.alive for child in cluster.children.values())
    assert not cluster.embedded.running


async def reach_step(cluster: LocalCluster, step: int, token: str = "") -> None:
    """Wait until the job has done that many steps. Raises ClusterError if it cannot."""
    async with asyncio.timeout(END_S):
        while True:
            if cluster.final.done():
                cluster.final.result()
            with suppress(PeerError, DeadlineExceeded):  # a busy machine
                async with client_of(await cluster.master_url(), token) as client:
                    job = await client.get_job(cluster.spec.job)
                assert job.phase in {"WAITING", "RUNNING", "CHECKPOINTING", "ROLLING_BACK"}, job
                if (job.progress.step or 0) >= step:
                    return
            await asyncio.sleep(0.05)


async def ended(cluster: LocalCluster) -> JobState:
    """Its last state. Nothing is left to be done to it, so it need not be slow any more."""
    Path(cluster.spec.script).with_name("slow").unlink(missing_ok=True)
    return await cluster.wait(END_S)


async def completed(cluster: LocalCluster) -> dict[str, torch.Tensor]:
    state = await ended(cluster)
    assert state.phase is Phase.COMPLETED, state
    assert state.result.trained_records == cluster.spec.epochs * RECORDS
    assert state.result.discarded_tasks == 0
    return torch.load(state.result.exports["state_dict"], weights_only=True)


async def completed_in_spite_of_deaths(cluster: LocalCluster, *names: str) -> dict[str, torch.Tensor]:
    """As `completed`; these processes are killed one after the other, each a sixth of the steps later."""
    for number, name in enumerate(names, 1):
        await reach_step(cluster, number * STEPS // 6)
        cluster.kill(name)
    found = await completed(cluster)
    assert all(cluster.deaths[name] >= 1 for name in names), cluster.deaths
    return found


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
