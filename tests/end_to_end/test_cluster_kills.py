"""A cluster whose processes are killed while something is asked of its leader: nothing is lost, nothing is
done twice, no bit differs.

submit, resize, pause, resume, cancel ─ the same key until it is answered
SIGKILL of a random process ─ within a second of it
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.cluster_command import AWAY, model_of, script_in, up
from tests.end_to_end.command import Command
from tests.end_to_end.local_cluster import EPOCHS, RECORDS, same_bits, spec_of
from trireme.client import AsyncClient, CreateJob
from trireme.pool import cluster_folder
from trireme.script_source import read_source
from trireme.view.job_address import client_of
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest import JobView

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]
ANSWER_S, END_S = 60.0, 200.0
LATEST_S = 1.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED"}
OF_KIND = {
    "master": lambda words: "master_service" in words,
    "agent": lambda words: "trireme.host" in words,
    "trainer": lambda words: "[trainer-" in words or "trainer_agent" in words,
    "pserver": lambda words: "[pserver-" in words or "pserver_service" in words,
    "etcd": lambda words: "etcd" in words.split(" ")[0],
}


@dataclass
class Disturbed:
    """Asks the cluster in `trireme.folder` for things, and kills a process of it meanwhile."""

    trireme: Command
    rng: random.Random
    request: dict[str, Any]
    killed: list[str] = field(default_factory=list)

    async def ask(self, call: Callable[[AsyncClient], Awaitable[Any]], limit_s: float = ANSWER_S) -> Any:
        """Until the cluster answers."""
        async with asyncio.timeout(limit_s):
            while True:
                with contextlib.suppress(*AWAY):
                    found = cluster_folder.must_find(self.trireme.folder / ".trireme")
                    async with client_of(found.url, found.token) as cluster:
                        return await call(cluster)
                await asyncio.sleep(0.1)

    async def kill(self, kind: str) -> None:
        await asyncio.sleep(self.rng.random() * LATEST_S)
        found = {}
        for process in self.trireme.family():
            with contextlib.suppress(psutil.Error):
                if OF_KIND[kind](" ".join(process.cmdline())):
                    found[process.pid] = process
        if found:
            found[self.rng.choice(sorted(found))].kill()
            self.killed.append(kind)

    async def meanwhile(self, asked: Awaitable[Any]) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.kill(self.rng.choice(("master", "master", *OF_KIND))))
            result = group.create_task(asked)  # type: ignore[arg-type]
        return result.result()

    async def submit(self, name: str) -> None:
        job = CreateJob(**self.request, name=name)
        made = await self.ask(lambda cluster: cluster.create_job(job, key=f"key-{name}"))
        assert made.job == name
        again = await self.ask(lambda cluster: cluster.create_job(job, key=f"key-{name}"))
        assert again.create_time == made.create_time, "a repeated key gives the same job"

    async def resize(self, name: str, **numbers: int) -> None:
        async def ended(cluster: AsyncClient) -> Any:
            while (found := await cluster.get_resize(name, made.operation_id, wait_s=1.0)).state == "RUNNING":
                pass
            return found

        made = await self.ask(
            lambda cluster: cluster.create_resize(name, key=f"key-{name}-{numbers}", **numbers)  # type: ignore[arg-type]
        )
        done = await self.ask(ended, END_S)
        assert done.phase in {"COMMITTED", "ROLLED_BACK", "FAILED"}, done

    async def act(self, name: str, action: Any, standing: set[str]) -> None:
        async def asked(cluster: AsyncClient) -> None:
            acts = {"pause": cluster.pause_job, "resume": cluster.resume_job, "cancel": cluster.cancel_job}
            try:
                await acts[action](name)
            except Conflict:
                if (await cluster.get_job(name)).standing not in standing:
                    raise

        await self.ask(asked)
        await self.until(name, lambda job: job.standing in standing)

    async def until(self, name: str, holds: Callable[[JobView], bool]) -> JobView:
        job: JobView | None = None
        try:
            async with asyncio.timeout(END_S):
                while not holds(job := await self.ask(lambda cluster: cluster.get_job(name))):
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"waited {END_S:g} s for {name}: {job}; killed: {self.killed}") from None
        return job


def request_in(folder: Path) -> dict[str, Any]:
    script = script_in(folder)
    spec = spec_of(folder, trainers=1, pservers=1)
    settings = spec.model_dump(mode="json", include=set(JobSettings.model_fields))
    scheduling = {"min_trainers": 1, "max_trainers": 2}
    return {"settings": settings, "source": read_source(script).model_dump(), "scheduling": scheduling}


@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_killed_while_something_is_asked_nothing_is_lost_or_doubled(trireme, undisturbed, seed):
    rng = random.Random(seed)

    def trains(job: JobView) -> bool:
        return (job.progress.step or 0) >= 2

    async def scenario() -> dict[str, JobView]:
        disturbed = Disturbed(trireme, rng, request_in(trireme.folder))
        await disturbed.meanwhile(disturbed.submit("a"))
        await disturbed.meanwhile(disturbed.submit("b"))
        await disturbed.until("a", trains)
        await disturbed.meanwhile(disturbed.resize("a", pservers=2))
        await disturbed.meanwhile(disturbed.act("b", "pause", {"PAUSED"}))
        await disturbed.meanwhile(disturbed.submit("c"))
        await disturbed.meanwhile(disturbed.resize("a", pservers=1))
        await disturbed.meanwhile(disturbed.act("b", "resume", {"QUEUED", "ACTIVE"}))
        await disturbed.meanwhile(disturbed.act("c", "cancel", {"CANCELLED"}))
        (trireme.folder / "slow").unlink()
        ended = {
            name: await disturbed.until(name, lambda job: job.standing in ENDED) for name in ("a", "b", "c")
        }

        async def listed(cluster: AsyncClient) -> list[str]:
            return [job.job async for job in cluster.list_jobs()]

        assert await disturbed.ask(listed) == ["a", "b", "c"]
        assert disturbed.killed
        return ended

    arguments = ("--trainers", 3, "--pservers", 3, "--standbys", 1)
    with up(trireme, *arguments):
        ended = asyncio.run(scenario())
        assert {name: job.standing for name, job in ended.items()} == {
            "a": "COMPLETED",
            "b": "COMPLETED",
            "c": "CANCELLED",
        }, ended
        for name in ("a", "b"):
            assert ended[name].result.trained_records == EPOCHS * RECORDS
            assert same_bits(model_of(ended[name].model_dump(mode="json")), undisturbed)
