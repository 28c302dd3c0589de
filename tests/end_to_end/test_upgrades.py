"""A cluster of real processes whose version changes while it trains, and changes back: the jobs of both
strategies have the bits of a job that nobody disturbed.

The version before is the tree of the commit OLDER (TRIREME_OLDER_COMMIT names another one), unpacked beside
this one; both use the packages that are installed.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from tests.end_to_end.cluster_command import model_of, script_in
from tests.end_to_end.command import Command
from tests.end_to_end.local_cluster import same_bits, spec_of
from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.forked import MARK, clean_environment
from tests.equipment.waiting import until
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_spec import JobSettings

__all__ = ["embedded_etcd"]

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1800)]

HERE = Path(__file__).parents[2]
OLDER = os.environ.get("TRIREME_OLDER_COMMIT", "55aa464b")
TOKEN = "between-versions"
LIMIT_S, END_S = 300.0, 120.0
LEASE_S = 3.0
STEPS = 3  # that each job makes between two changes
SLOW_S = 0.1
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "servers": {"strategy": "parameter_server", "trainers": 1, "pservers": 1},
    "exchange": {"strategy": "collective", "trainers": 1, "pservers": 0},
}
BACK = [("older", "newer", "older"), ("newer", "older", "newer")]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    packed = subprocess.run(["git", "-C", str(HERE), "archive", OLDER], capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"there is no commit {OLDER} here: {packed.stderr.decode()}")
    older = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(older, filter="data")
    return {"older": older, "newer": HERE}


class Cluster:
    """Masters and host agents by name, each of one of both versions, and what is asked of the leader."""

    def __init__(self, trireme: Command, url: str, trees: Mapping[str, Path]) -> None:
        self._trireme, self._url, self._trees = trireme, url, trees
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._etcd = connect([url])
        self.folder = trireme.folder

    async def master(self, name: str, version: str) -> None:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        await self._start(name, "master_service", version, STORAGE=self.folder / "jobs", READY_FILE=ready)
        await until(ready.exists, f"{name} to start", LIMIT_S)

    async def host(self, name: str, version: str) -> None:
        places = {"TRAINERS": 2, "PSERVERS": 1, "DATA_DIR": self.folder / name, "AGENT_TTL_S": LEASE_S}
        await self._start(name, "trireme.host", version, **places)

    async def _start(self, name: str, module: str, version: str, **settings: object) -> None:
        tree = self._trees[version]
        given = {"ETCD": self._url, "TOKEN": TOKEN, "NAME": name, "DRAIN_SECONDS": 10, **settings}
        environment = clean_environment() | {MARK: self._trireme.mark}
        environment |= {f"TRIREME_{key}": str(value) for key, value in given.items()}
        environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "shared")])
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module), cwd=tree, env=environment, stdout=log, stderr=log
            )

    async def stop(self, *names: str) -> None:
        """In order, as an upgrade does."""
        for name in names:
            process = self._processes.pop(name)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(END_S):
                code = await process.wait()
            assert code == 0, f"{name} ended with {code}: {self.log_of(name)}"

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    async def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            await process.wait()
        await self._etcd.close()

    async def ask(self, method: str, path: str, body: Any = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Until the leader answers. As JSON: a client of either version would want fields of its own."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        if body is not None:
            headers["Idempotency-Key"] = f"{path} {body['name']}"
        async with asyncio.timeout(limit_s), httpx.AsyncClient(headers=headers, trust_env=False) as client:
            while True:
                found = await self._etcd.get(ClusterKeys().address)
                if found is not None:
                    with suppress(httpx.TransportError):
                        url = json.loads(found.value)["url"]
                        answer = await client.request(method, f"{url}{path}", json=body, timeout=10)
                        if answer.status_code < 500:
                            assert answer.is_success, answer.text
                            return dict(answer.json())
                await asyncio.sleep(0.05)

    async def submit(self, spec: JobSpec) -> None:
        settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields), exclude_unset=True)
        for name in ("dataset", "evaluation_dataset"):
            settings[name] = getattr(spec, name).model_dump(mode="json")
        wanted = {"name": spec.job, "settings": settings, "script": spec.script}
        await self.ask("POST", "/v1/jobs", wanted | {"scheduling": {"max_trainers": 1}})

    async def train(self) -> None:
        """Until each job has made STEPS more."""
        before = {name: (await self.job(name))["progress"]["step"] or 0 for name in STRATEGIES}
        for name, step in before.items():
            await self.until(name, lambda job: (job["progress"]["step"] or 0) >= step + STEPS)  # noqa: B023

    async def job(self, name: str) -> dict[str, Any]:
        return await self.ask("GET", f"/v1/jobs/{name}")

    async def until(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        job: dict[str, Any] = {}
        try:
            async with asyncio.timeout(LIMIT_S):
                while not holds(job := await self.job(name)):
                    assert job["phase"] not in ("FAILED", "COMPLETED"), job
                    await asyncio.sleep(0.1)
        except TimeoutError:
            logs = "".join(f"\n== {each}\n{self.log_of(each)}" for each in self._processes)
            raise AssertionError(f"waited {LIMIT_S:g} s for {name}: {job}{logs}") from None
        return job

    async def ends(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each job."""
        (self.folder / "slow").unlink()
        return {name: model_of(await self.until(name, _is_over)) for name in STRATEGIES}


def _is_over(job: dict[str, Any]) -> bool:
    return bool(job["standing"] == "COMPLETED")


@pytest_asyncio.fixture
async def cluster(
    trireme: Command, embedded_etcd: EmbeddedEtcd, trees: Mapping[str, Path]
) -> AsyncIterator[Cluster]:
    made = Cluster(trireme, embedded_etcd.url, trees)
    try:
        yield made
    finally:
        await made.close()


async def submit_both(cluster: Cluster) -> None:
    script = script_in(cluster.folder, SLOW_S)
    for name, numbers in STRATEGIES.items():
        spec = spec_of(cluster.folder, job=name, **numbers)
        await cluster.submit(spec.with_fields(script=str(script)))


def check(found: Mapping[str, dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for name, parameters in found.items():
        assert same_bits(parameters, wanted), name


@pytest.mark.parametrize("versions", BACK, ids="-".join)
async def test_a_cluster_is_restarted_with_another_version_and_with_the_first_one_again(
    cluster: Cluster, versions: tuple[str, ...], undisturbed: dict[str, torch.Tensor]
) -> None:
    for number, version in enumerate(versions):
        await cluster.master("master", version)
        await cluster.host("host", version)
        if not number:
            await submit_both(cluster)
        await cluster.train()
        if number < len(versions) - 1:
            await cluster.stop("host", "master")
    found = await cluster.ends()
    await cluster.stop("host", "master")
    check(found, undisturbed)
