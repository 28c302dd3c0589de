"""Pre- and post-tasks on a real host agent: what they run, what they leave, and how they are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.equipment.etcd.real import embedded_etcd
from tests.trireme.pool.hosts import KEYS, Host, family, job_in
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, PoolMember, Source
from trireme_shared.protocol.records.job_choices import JobTask

__all__ = ["embedded_etcd"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the agent's children are forked, as Linux can"),
]
HELPER = (
    "import os\n\n\ndef made():\n    print('made for', os.environ['TRIREME_JOB'], flush=True)\n\n\n"
    "def broken():\n    raise ValueError('no input')\n"
)
TASKS = (
    JobTask(
        command="echo in $PWD; echo $TRIREME_TASK of $TRIREME_JOB at $TRIREME_STORAGE, $TRIREME_STANDING; "
        "exit 3"
    ),
    JobTask(function="helper:made"),
    JobTask(function="helper:broken"),
    JobTask(command="sleep 600 & echo started $!; sleep 600"),
)


@pytest_asyncio.fixture
async def host(embedded_etcd: EmbeddedEtcd, tmp_path: Path, mark: str) -> AsyncIterator[Host]:
    etcd: Etcd = connect([embedded_etcd.url])
    found = Host(tmp_path / "host", etcd, embedded_etcd.url, mark, trainers=1, pservers=0)
    await store(etcd, tmp_path)
    await found.start()
    try:
        yield found
    finally:
        if found.process is not None and found.process.returncode is None:
            found.process.kill()
            await found.end()
        await etcd.close()


async def store(etcd: Etcd, folder: Path) -> None:
    """A job with its script, whose tasks are TASKS."""
    spec, script = job_in(folder, "a")
    source = Source(file_name=script.file_name, text=script.text, modules={"helper.py": HELPER})
    job = ClusterJob(job="a", spec=spec.model_copy(update={"script": source.script, "pre_tasks": TASKS}))
    await etcd.put(KEYS.source(source.digest), source.to_bytes())
    await etcd.put(KEYS.job("a"), job.to_bytes())


async def run(host: Host, name: str, *, attempt: int = 1, limit_s: float = 60.0) -> PoolMember:
    """As the leader assigns it."""
    member = await host.registered()
    work = Assignment(
        job="a", epoch=0, incarnation=member.incarnation, task=name, attempt=attempt, limit_s=limit_s
    )
    await host.etcd.put(KEYS.assignment("trainer", member.member), work.to_bytes())
    return await host.when(
        "trainer", 0, lambda now: (now.task, now.attempt) == (name, attempt), "the task to begin"
    )


async def ended(host: Host) -> PoolMember:
    return await host.when("trainer", 0, lambda now: now.ended, "the end of the task")


def log_of(host: Host, name: str) -> str:
    path = host.folder / "logs" / "a" / f"{name}-h-trainer-0-1.log"
    return path.read_text() if path.is_file() else ""


async def started_by(host: Host, name: str) -> int:
    """The pid that the task has printed."""
    async with asyncio.timeout(60):
        while not (found := log_of(host, name).partition("started ")[2].strip()):
            await asyncio.sleep(0.05)
    return int(found)


async def gone(pid: int) -> None:
    async with asyncio.timeout(60):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def test_commands_and_functions_run_with_the_jobs_environment_and_their_output_is_kept(host, tmp_path):
    await run(host, "pre-0")
    end = await ended(host)
    folder, told = end.output.splitlines()
    assert (end.exit_code, told) == (3, f"pre-0 of a at {tmp_path}/storage-a, QUEUED")
    assert Path(folder.removeprefix("in ")).parent == host.folder / "sources"
    await run(host, "pre-1")
    end = await ended(host)
    assert (end.exit_code, end.output) == (0, "made for a")
    await run(host, "pre-2")
    end = await ended(host)
    assert end.exit_code == 1
    assert "ValueError: no input" in end.output
    await host.unassign("trainer", 0)
    idle = await host.when("trainer", 0, lambda now: not now.running, "the place to be idle")
    assert (idle.task, idle.attempt, idle.exit_code, idle.output) == ("", 0, None, "")


async def test_a_task_over_its_time_limit_is_ended_with_all_that_it_started(host):
    await run(host, "pre-3", limit_s=20.0)
    pid = await started_by(host, "pre-3")
    end = await ended(host)
    assert (end.exit_code, end.trouble) == (124, "it ran over its time limit of 20 s")
    await gone(pid)


async def test_a_task_that_is_taken_back_is_ended_with_all_that_it_started(host):
    await run(host, "pre-3")
    pid = await started_by(host, "pre-3")
    await host.unassign("trainer", 0)
    await host.when("trainer", 0, lambda now: not now.running, "the place to be idle")
    await gone(pid)


async def test_nothing_of_a_task_outlives_its_host_agent(host, mark):
    await run(host, "pre-3")
    pid = await started_by(host, "pre-3")
    os.kill(host.pid, signal.SIGKILL)
    await host.end()
    await gone(pid)
    async with asyncio.timeout(60):
        while [each for each in family(mark) if each.pid != host.pid]:
            await asyncio.sleep(0.05)
