"""A cluster of real processes with four good jobs that train all the while, and room for one job more, which
is poisoned.

unharmed(): the processes of the cluster and of the good jobs, and the leader's term, before a poison
    ── the poison ──► the same ones (another leader if the poison is the leader's death), and every good job
                      has trained on
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import torch

from tests.end_to_end.cluster_command import AWAY
from tests.end_to_end.local_cluster import slowable_loss, spec_of
from tests.end_to_end.scripts import CONFIG, DATASET, EVALUATION, HEAD, LOSS, MODEL, OPTIMIZER, RECORDS
from tests.equipment.command_lines import command_line
from trireme.client import AsyncClient, CreateJob
from trireme.pool import cluster_folder
from trireme.view.job_address import client_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import Source
from trireme_shared.protocol.records.job_spec import JobSettings, JobSpec
from trireme_shared.protocol.records.members import MasterLock
from trireme_shared.protocol.rest import JobView

ANSWER_S, LIMIT_S = 60.0, 200.0
SLOW_S = 1.0  # of a minibatch of a good job, until all poisons were given
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "UNREADABLE"}
GOOD: Mapping[str, Mapping[str, Any]] = {
    "servers": {"strategy": "parameter_server", "trainers": 1, "pservers": 1},
    "servers-saved": {
        "strategy": "parameter_server",
        "trainers": 1,
        "pservers": 1,
        "checkpoint_every_steps": 3,
    },
    "exchange": {"strategy": "collective", "trainers": 1, "pservers": 0},
    "exchange-of-two": {"strategy": "collective", "trainers": 2, "pservers": 0},
}
#: Of good jobs and a poisoned one.
PLACES = ("--trainers", 6, "--pservers", 3, "--standbys", 1)
LOG_BYTES, LOGS_BYTES = 1 << 20, 8 << 20
#: Of the cluster: logs that a job can fill, and leases that do not end because the machine is busy.
ENVIRONMENT = {
    "TRIREME_LOG_BYTES": str(LOG_BYTES),
    "TRIREME_LOGS_BYTES": str(LOGS_BYTES),
    "TRIREME_MASTER_TTL_S": "15",
    "TRIREME_AGENT_TTL_S": "15",
}
LEASE_S = 15.0


@dataclass(frozen=True)
class Standing:
    """`term`: of the leader. `masters`: pids by name. `agents`: pids of `up`, of etcd and of the host agent.
    `members`: pids of each good job's members. `generations`: of its list of members, and how often it was
    started."""

    leader: str
    term: int
    masters: Mapping[str, int]
    agents: tuple[int, ...]
    members: Mapping[str, frozenset[int]]
    generations: Mapping[str, tuple[int | None, int]]

    def without_leader(self, leader: str) -> Standing:
        masters = {name: pid for name, pid in self.masters.items() if name != leader}
        return replace(self, leader="", term=0, masters=masters)


class Cluster:
    """Use it as `async with`. `folder`: of the test. `epochs`: of each good job, so many that they train
    until the last poison was given."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder, self.epochs = folder, epochs
        self.keys = ClusterKeys()
        self._settings = spec_of(self.folder).model_dump(mode="json")
        self.etcd: Etcd

    def __repr__(self) -> str:
        return f"<Cluster in {self.folder}>"

    async def __aenter__(self) -> Self:
        self.etcd = EtcdAccess.from_facts(self.facts.etcd).connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.etcd.close()

    @property
    def facts(self) -> cluster_folder.ClusterFacts:
        return cluster_folder.must_find(self.folder / ".trireme")

    @property
    def address(self) -> tuple[str, int]:
        """Of the API, for requests that no client would make."""
        host, _, port = self.facts.url.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def storage(self) -> Path:
        """The files of jobs by name."""
        return self.facts.folder / "jobs"

    @property
    def slow(self) -> Path:
        return self.folder / "slow"

    # ------------------------------------------------------------ what a client asks

    async def ask(self, call: Callable[[AsyncClient], Awaitable[Any]], limit_s: float = ANSWER_S) -> Any:
        """Until the leader answers."""
        async with asyncio.timeout(limit_s):
            while True:
                with suppress(*AWAY):
                    async with client_of(self.facts.url, self.facts.token) as client:
                        return await call(client)
                await asyncio.sleep(0.1)

    async def refusal(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The problem that the leader answers. As JSON: our own client would refuse the body itself."""
        headers = {"Authorization": f"Bearer {self.facts.token}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=ANSWER_S) as client:
            answer = await client.request(method, f"{self.facts.url}{path}", json=body)
        assert 400 <= answer.status_code < 500, answer.text
        return dict(answer.json())

    def spec(self, **changes: Any) -> JobSpec:
        """Of a job that trains as the good ones do."""
        numbers = {"lease_ttl_s": LEASE_S, "trainers": 1, "pservers": 1}
        return JobSpec.model_validate({**self._settings, **numbers, **changes})

    def body(self, name: str, text: str, **changes: Any) -> dict[str, Any]:
        """Of createJob, without its settings' own fields: `source`, `modules`, `script`, `file_name`."""
        file_name, modules = changes.pop("file_name", "script.py"), changes.pop("modules", {})
        path = changes.pop("script", "")
        spec = self.spec(**changes)
        settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields))
        source = None if path else Source(file_name=file_name, text=text, modules=modules).model_dump()
        scheduling = {"min_trainers": spec.trainers, "max_trainers": spec.trainers}
        return {
            "name": name,
            "settings": settings,
            "source": source,
            "script": path,
            "scheduling": scheduling,
        }

    async def submit(self, name: str, text: str, **changes: Any) -> None:
        job = CreateJob.model_validate(self.body(name, text, **changes))
        made = await self.ask(lambda client: client.create_job(job, key=f"create {name}"))
        assert made.job == name

    async def job(self, name: str) -> JobView:
        found: JobView = await self.ask(lambda client: client.get_job(name))
        return found

    async def until(
        self, name: str, holds: Callable[[JobView], object], what: str, limit_s: float = LIMIT_S
    ) -> JobView:
        found: JobView | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    with suppress(Conflict):  # its term has just ended
                        if holds(found := await self.job(name)):
                            return found
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"waited {limit_s:g} s for {what} of job {name}: {found}") from None

    async def ended(self, name: str) -> JobView:
        return await self.until(name, lambda job: job.standing in ENDED, "the end")

    async def trains(self, name: str, step: int = 1) -> JobView:
        def holds(job: JobView) -> bool:
            assert job.standing not in ENDED, job
            return (job.progress.step or 0) >= step

        return await self.until(name, holds, f"step {step}")

    async def train_slowly(self, name: str) -> None:
        """Until it is told otherwise."""
        await self.submit(name, self.script(self.slow, 0.3), epochs=1000)
        await self.trains(name)

    async def remove(self, name: str) -> None:
        """It is ended if it runs, and deleted."""
        job = await self.job(name)
        if job.standing not in ENDED:
            await self.ask(lambda client: client.cancel_job(name))
            await self.ended(name)
        await self.deleted(name)
        assert name not in await self.names()

    async def deleted(self, name: str) -> Any:
        """What the operation says."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                with suppress(Conflict):  # its members are leaving
                    done = await self.ask(lambda client: client.delete_job(name, wait_s=30))
                    if not done.running:
                        return done
                await asyncio.sleep(0.2)

    async def names(self) -> set[str]:
        return set(await self.standings())

    async def standings(self) -> dict[str, str]:
        async def listed(client: AsyncClient) -> dict[str, str]:
            return {job.job: job.standing async for job in client.list_jobs()}

        found: dict[str, str] = await self.ask(listed)
        return found

    async def events(self, name: str) -> list[str]:
        """Names of the cluster's events of that job."""
        page = await self.ask(lambda client: client.list_cluster_events(page_size=1000))
        return [event.name for event in page.events if event.fields.get("job") == name]

    async def explained(self, name: str, code: str) -> list[str]:
        """The details of that cause, if it is one."""
        found = await self.ask(lambda client: client.explain_job(name))
        return [detail for cause in (found, *found.also) if cause.code == code for detail in cause.details]

    async def members(self, name: str) -> frozenset[int]:
        async def listed(client: AsyncClient) -> frozenset[int]:
            return frozenset([member.pid async for member in client.list_members(name)])

        found: frozenset[int] = await self.ask(listed)
        return found

    # ------------------------------------------------------------ the good jobs

    def script(self, slow: Path, slow_s: float, **parts: str) -> str:
        """The text of the good jobs' script; `parts` replace its pieces. A minibatch takes `slow_s` while the
        file `slow` is there."""
        head = HEAD.replace("Path(__file__).parent", f"Path({str(self.folder / 'data')!r})")
        loss = slowable_loss(slow, slow_s) if slow_s else LOSS
        pieces = {"head": head, "config": CONFIG, "model": MODEL, "dataset": DATASET, "loss": loss}
        pieces |= {"optimizer": OPTIMIZER, "evaluation": EVALUATION}
        return "\n".join((pieces | parts).values())

    async def begin(self) -> None:
        """The good jobs, until each of them trains."""
        self.slow.touch()
        for name, settings in GOOD.items():
            await self.submit(name, self.script(self.slow, SLOW_S), epochs=self.epochs, **settings)
        for name in GOOD:
            await self.trains(name)

    async def finish(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each good job."""
        for name in GOOD:
            assert (await self.job(name)).standing == "ACTIVE", (
                "it had to train until the last poison was given"
            )
        self.slow.unlink()
        return {name: await self._parameters(name) for name in GOOD}

    async def _parameters(self, name: str) -> dict[str, torch.Tensor]:
        job = await self.ended(name)
        assert (job.standing, job.starts) == ("COMPLETED", 1), job
        assert job.result is not None
        assert (job.result.trained_records, job.result.discarded_tasks) == (self.epochs * RECORDS, 0), job
        parameters: dict[str, torch.Tensor] = torch.load(job.result.exports["state_dict"], weights_only=True)
        return parameters

    @asynccontextmanager
    async def unharmed(self, *, leader_dies: bool) -> AsyncIterator[None]:
        before = await self.standing()
        steps = {name: (await self.trains(name)).progress.step or 0 for name in GOOD}
        yield
        for name, step in steps.items():
            await self.trains(name, step + 1)
        after = await self.standing()
        if leader_dies:
            assert after.term > before.term
            before, after = before.without_leader(before.leader), after.without_leader(before.leader)
        assert after == before, f"{before}\n{after}\n{self.said()}"

    async def standing(self) -> Standing:
        lock = await self.etcd.get(self.keys.lock)
        assert lock is not None, "nobody leads"
        masters: dict[str, int] = {}
        agents = [self.facts.pid]
        for process in psutil.Process(self.facts.pid).children():
            words = command_line(process)
            if found := re.search(r"master_service \[(.*)\]", words):
                masters[found[1]] = process.pid
            elif "trireme.host" in words or "etcd" in words:
                agents.append(process.pid)
        jobs = {name: await self.trains(name) for name in GOOD}
        return Standing(
            leader=MasterLock.from_bytes(lock.value).master.rpartition("-")[0],
            term=lock.create_revision,
            masters=masters,
            agents=tuple(agents),
            members={name: await self.members(name) for name in GOOD},
            generations={name: (job.generation, job.starts) for name, job in jobs.items()},
        )

    async def kill_leader(self) -> None:
        """Until another one leads."""
        before = await self.standing()
        psutil.Process(before.masters[before.leader]).kill()
        async with asyncio.timeout(ANSWER_S):
            while True:
                lock = await self.etcd.get(self.keys.lock)
                if lock is not None and lock.create_revision > before.term:
                    return
                await asyncio.sleep(0.1)

    def said(self) -> str:
        """The last lines of the masters' logs, and of the cluster's own."""
        logs = [self.folder / "up.log", *sorted((self.facts.folder / "logs").glob("master-*.log"))]
        return "".join(f"\n== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


async def settled(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = clock.monotonic() + limit_s
    while not holds():
        assert clock.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        await asyncio.sleep(0.1)
