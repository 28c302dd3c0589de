"""A cluster of real processes of several versions of Trireme, and what is asked of its leader.

An earlier version is the tree of a commit, unpacked beside this one; all use the packages that are installed.
Its members do not say which version they have.
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
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
import torch

from tests.end_to_end.cluster_command import model_of, script_in
from tests.end_to_end.command import Command, Done
from tests.end_to_end.local_cluster import same_bits, spec_of
from tests.equipment.forked import MARK, clean_environment
from tests.equipment.waiting import until
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, MasterLock, PserverMember, TrainerList, TrainerMember
from trireme_shared.protocol.records.job_spec import JobSettings

HERE = Path(__file__).parents[2]
COMMITS = {
    "older": os.environ.get("TRIREME_OLDER_COMMIT", "55aa464b"),
    "oldest": os.environ.get("TRIREME_OLDEST_COMMIT", "7920761a"),
}
"""The version before this one, and the one before that."""
CREATED = 201
TOKEN = "between-versions"
LIMIT_S, END_S = 300.0, 120.0
LEASE_S = 3.0
AWAY = (421, 502, 503, 504)  # while another master takes over
STEPS = 3  # that each job makes between two changes
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "servers": {"strategy": "parameter_server", "trainers": 1, "pservers": 1},
    "exchange": {"strategy": "collective", "trainers": 1, "pservers": 0},
}


class Trees:
    """The folder of each version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, version: str) -> Path:
        if version == "newer":
            return HERE
        tree = self._folder / version
        if not tree.exists():
            commit = COMMITS[version]
            command = ["git", "-C", str(HERE), "archive", commit]
            packed = subprocess.run(command, capture_output=True, check=False)
            if packed.returncode:
                pytest.skip(f"there is no commit {commit} here: {packed.stderr.decode()}")
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(tree, filter="data")
        return tree

    def search_path(self, version: str) -> str:
        """PYTHONPATH: what is imported from there."""
        tree = self[version]
        roots = [tree, *([tree / "shared"] if (tree / "shared" / "trireme_shared").exists() else [])]
        return os.pathsep.join(map(str, roots))


class Members(NamedTuple):
    """Of a job: the version of each."""

    trainers: list[str]
    pservers: list[str]


def _version(said: str) -> str:
    return "newer" if said else "older"


class Cluster:
    """Masters and host agents by name, each of any version, and what is asked of the leader."""

    def __init__(self, trireme: Command, url: str, trees: Trees) -> None:
        self._trireme, self._url, self._trees = trireme, url, trees
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._etcd = connect([url])
        self._submitted: dict[str, dict[str, Any]] = {}
        self.folder = trireme.folder

    async def master(self, name: str, version: str) -> None:
        files = {"STORAGE": self.folder / "jobs", "PORT_FILE": self.folder / f"{name}.port"}
        await self._start(name, "master_service", version, MASTER_TTL_S=LEASE_S, **files)

    async def host(self, name: str, version: str) -> None:
        places = {"TRAINERS": 2, "PSERVERS": 1, "DATA_DIR": self.folder / name, "AGENT_TTL_S": LEASE_S}
        await self._start(name, "trireme.host", version, **places)

    async def _start(self, name: str, module: str, version: str, **settings: object) -> None:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        given = {"ETCD": self._url, "TOKEN": TOKEN, "NAME": name, "DRAIN_SECONDS": 10, "READY_FILE": ready}
        environment = clean_environment() | {MARK: self._trireme.mark}
        environment |= {f"TRIREME_{key}": str(value) for key, value in (given | settings).items()}
        environment["PYTHONPATH"] = self._trees.search_path(version)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                cwd=self._trees[version],
                env=environment,
                stdout=log,
                stderr=log,
            )
        await until(ready.exists, f"{name} to start", LIMIT_S)

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

    def logs(self) -> str:
        return "".join(f"\n== {each}\n{self.log_of(each)}" for each in self._processes)

    async def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            await process.wait()
        await self._etcd.close()

    async def ask(self, method: str, path: str, body: Any = None, at: str = "") -> dict[str, Any]:
        answer = await self.answer(method, path, body, at)
        assert answer.is_success, answer.text
        return dict(answer.json())

    async def answer(self, method: str, path: str, body: Any = None, at: str = "") -> httpx.Response:
        """Of the leader, as soon as there is one; `at`: through that standby. As JSON: a client of either
        version would want fields of its own."""
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"Trireme-Forward": "leader"} if at else {})
        if body is not None:
            headers["Idempotency-Key"] = f"{path} {body['name']}"
        async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(headers=headers, trust_env=False) as client:
            while True:
                with suppress(httpx.TransportError):
                    if url := (self._url_of(at) if at else await self.leading_url()):
                        answer = await client.request(method, f"{url}{path}", json=body, timeout=10)
                        if answer.status_code not in AWAY:
                            return answer
                await asyncio.sleep(0.05)

    async def leading_url(self) -> str:
        found = await self._etcd.get(ClusterKeys().address)
        return str(json.loads(found.value)["url"]) if found is not None else ""

    def _url_of(self, master: str) -> str:
        return f"http://127.0.0.1:{(self.folder / f'{master}.port').read_text()}"

    async def leader(self) -> str:
        """The name of the master that holds the lock; "": nobody does."""
        found = await self._etcd.get(ClusterKeys().lock)
        holder = MasterLock.from_bytes(found.value).master if found is not None else ""
        return next((name for name in self._processes if holder.startswith(f"{name}-")), "")

    async def hand_over(self, gone: str, next_one: str) -> None:
        """The leader `gone` is stopped in order; `next_one` leads within a lease from then on."""
        assert await self.leader() == gone
        began = clock.monotonic()
        stopping = asyncio.ensure_future(self.stop(gone))
        while await self.leader() != next_one:
            assert clock.monotonic() < began + LIMIT_S, self.logs()
            await asyncio.sleep(0.01)
        led_s = clock.monotonic() - began
        await self.job("servers")
        answered_s = clock.monotonic() - began
        await stopping
        print(f"{gone} -> {next_one}: it leads after {led_s:.2f} s and answers after {answered_s:.2f} s")  # noqa: T201
        assert led_s <= LEASE_S

    async def members(self, job: str) -> Members:
        """Which version they have that work for it now; a trainer without lanes does not."""
        keys = Keys(job)
        listed, trainers, pservers = await asyncio.gather(
            self._etcd.get(keys.trainer_list),
            self._etcd.range(keys.trainers, prefix=True),
            self._etcd.range(keys.pservers, prefix=True),
        )
        owners = TrainerList.from_bytes(listed.value).owners if listed is not None else ()
        works = [TrainerMember.from_bytes(kv.value) for kv in trainers.kvs if keys.is_trainer(kv.key)]
        serves = [PserverMember.from_bytes(kv.value) for kv in pservers.kvs]
        return Members(
            trainers=[_version(each.trireme_version) for each in works if each.trainer in owners],
            pservers=[_version(each.trireme_version) for each in serves],
        )

    async def until_members(self, holds: Callable[[Members], bool]) -> None:
        """Until those of each job are such that `holds`."""
        members: dict[str, Members] = {}
        try:
            async with asyncio.timeout(LIMIT_S):
                for name in STRATEGIES:
                    while not holds(members.setdefault(name, await self.members(name))):
                        await asyncio.sleep(0.1)
                        del members[name]
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S:g} s: {members}{self.logs()}") from None

    async def submit(self, spec: JobSpec, most_trainers: int = 1) -> None:
        settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields), exclude_unset=True)
        for name in ("dataset", "evaluation_dataset"):
            settings[name] = getattr(spec, name).model_dump(mode="json")
        wanted = {"name": spec.job, "settings": settings, "script": spec.script}
        self._submitted[spec.job] = wanted | {"scheduling": {"max_trainers": most_trainers}}
        answer = await self.submit_again(spec.job)
        assert answer.status_code == CREATED, answer.text

    async def submit_again(self, job: str) -> httpx.Response:
        """The same request with the same key, as of somebody who has got no answer."""
        return await self.answer("POST", "/v1/jobs", self._submitted[job])

    async def change_places(self, host: str, verb: str) -> None:
        """`verb`: drain, undrain."""
        for place in ("pserver-0", "trainer-0", "trainer-1"):
            await self.ask("POST", f"/v1/pool-members/{host}-{place}/{verb}")

    async def command(self, version: str, *words: object) -> Done:
        """`trireme` of that version, told where the leader is."""
        environment = clean_environment() | {MARK: self._trireme.mark, "TRIREME_TOKEN": TOKEN}
        environment["PYTHONPATH"] = self._trees.search_path(version)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trireme", *map(str, words), "--url", await self.leading_url()),
            cwd=self._trees[version],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        return Done(await process.wait(), out.decode(), err.decode())

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
                    ended = ("FAILED",) if holds is _is_over else ("FAILED", "COMPLETED")
                    assert job["phase"] not in ended, job
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S:g} s for {name}: {job}{self.logs()}") from None
        return job

    async def ends(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each job."""
        (self.folder / "slow").unlink()
        return {name: model_of(await self.until(name, _is_over)) for name in STRATEGIES}


def _is_over(job: dict[str, Any]) -> bool:
    return bool(job["standing"] == "COMPLETED")


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("trees"))


@pytest_asyncio.fixture
async def cluster(trireme: Command, embedded_etcd: EmbeddedEtcd, trees: Trees) -> AsyncIterator[Cluster]:
    made = Cluster(trireme, embedded_etcd.url, trees)
    try:
        yield made
    finally:
        await made.close()


async def submit_both(cluster: Cluster, slow_s: float, most_trainers: int = 1) -> None:
    """They train slowly until `Cluster.ends`: `slow_s` for each minibatch."""
    script = script_in(cluster.folder, slow_s)
    # all of them first: each one writes the data that a job would be reading
    specs = [spec_of(cluster.folder, job=name, **numbers) for name, numbers in STRATEGIES.items()]
    for spec in specs:
        await cluster.submit(spec.with_fields(script=str(script)), most_trainers)


def check(found: Mapping[str, dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for name, parameters in found.items():
        assert same_bits(parameters, wanted), name
