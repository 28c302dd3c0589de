"""Clients that are generated from what a cluster's leader serves as its document, type-checked, and
trireme.client, drive that cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import trireme_shared
from clients import generate
from clients.tools import is_go_installed, run
from tests.end_to_end.cluster_command import script_in, up
from tests.end_to_end.command import Command
from tests.end_to_end.scripts import RECORDS
from trireme.cli.targets import Target, cluster_target
from trireme.client import AsyncClient, Client, CreateJob, JobSettings, Scheduling, Source
from trireme.data import Npy
from trireme_shared.protocol.errors import Conflict, NotFound, Unauthorized

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TASKS = RECORDS // 16
JAVA_AND_GO = "Go and its generator, 400 MB, are not installed; `make clients` does that"


def test_generated_clients_and_our_own_drive_a_cluster(trireme: Command) -> None:
    script = script_in(trireme.folder)
    with up(trireme, "--trainers", 2, "--pservers", 1):
        target = cluster_target(trireme.folder / ".trireme", None)
        for make in (generate.python, generate.typescript):
            drive_by(make, target, trireme.folder, script)
        drive_by_our_own(trireme, target, script)


@pytest.mark.skipif(not is_go_installed(), reason=JAVA_AND_GO)
def test_a_generated_go_client_drives_a_cluster(trireme: Command) -> None:
    script = script_in(trireme.folder)
    with up(trireme, "--trainers", 2, "--pservers", 1):
        drive_by(generate.go, cluster_target(trireme.folder / ".trireme", None), trireme.folder, script)


def drive_by(make: Callable[[Path, Path], list[object]], target: Target, where: Path, script: Path) -> None:
    folder, document = where / make.__name__, where / "openapi.json"
    folder.mkdir()
    document.write_bytes(document_of(target))
    environment = {
        "SCENARIO_URL": target.address,
        "SCENARIO_TOKEN": target.token,
        "SCENARIO_JOB": make.__name__,
        "SCENARIO_SCRIPT": str(script),
        "SCENARIO_FILES": ",".join(data_of(script)),
    }
    saw = json.loads(run(make(document, folder), folder, **environment))
    events = saw.pop("events")
    assert (len(events) >= 3, events) == (True, sorted(set(events)))
    assert saw == {
        "version": trireme_shared.__version__,
        "same": True,
        "tasks": TASKS,
        "pages": -(-TASKS // 5),
        "checkpoint": "DONE",
        "resize": "COMMITTED",
        "trainers": 2,
        "problem": "NOT_FOUND",
        "states": ["PAUSED", "CANCELLED"],
    }


def data_of(script: Path) -> list[str]:
    return [str(script.parent / name) for name in ("x.npy", "y.npy")]


def document_of(target: Target) -> bytes:
    headers = {"Authorization": f"Bearer {target.token}"}
    answer = httpx.get(f"{target.address}/openapi.json", headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def drive_by_our_own(trireme: Command, target: Target, script: Path) -> None:
    url, token = target.address, target.token
    settings = JobSettings(
        dataset=Npy(*data_of(script), aligned=True),
        epochs=10_000,
        global_batch_size=32,
        lanes=4,
        records_per_task=16,
        block_bytes=256,
    )
    source = Source(file_name="script.py", text=script.read_text())
    job = CreateJob(name="ours", settings=settings, source=source, scheduling=Scheduling(max_trainers=1))
    with Client(url, token=token) as client:
        client.create_job(job)
        client.wait_for_job("ours", lambda found: (found.progress.step or 0) >= 1)
        assert len({task.task_id for task in client.list_tasks("ours", page_size=5)}) == TASKS
        saved = client.create_checkpoint("ours", cause="test")
        checkpoint = client.wait_for_operation("ours", saved.operation_id).checkpoint_id
        assert checkpoint in [each.checkpoint_id for each in client.list_checkpoints("ours")]
        assert client.predict_resize("ours", trainers=2).pservers == 1
        told = trireme.run("scale", "ours", "--trainers", 2, "--dry-run", "--json")
        assert (told.code, json.loads(told.out)["trainers"]) == (0, 2), told
        resize = client.create_resize("ours", trainers=2)
        assert client.wait_for_resize("ours", resize.operation_id).phase == "COMMITTED"
        paused = client.pause_job("ours")
        assert client.wait_for_operation("ours", paused.operation_id).state == "DONE"
        assert client.get_job("ours").state == "PAUSED"
        with pytest.raises(Conflict):
            client.get_task_summary("ours")
        client.resume_job("ours")
        client.wait_for_job("ours", lambda found: found.state == "RUNNING")
        with pytest.raises(NotFound):
            client.get_task("ours", "no-such-task")
    if token:
        with Client(url, token="wrong") as stranger, pytest.raises(Unauthorized):
            stranger.get_job("ours")
    asyncio.run(cancelled_while_followed(url, token))


async def cancelled_while_followed(url: str, token: str) -> None:
    async with AsyncClient(url, token=token) as client:
        followed = asyncio.ensure_future(names_of_events(client))
        async with asyncio.timeout(60):  # the job has just been resumed
            while (member := await anext(client.list_members("ours"), None)) is None:
                await asyncio.sleep(0.1)
        assert (await client.get_member("ours", member.member_id)).pid == member.pid
        await client.cancel_job("ours")
        assert (await client.wait_for_job("ours")).standing == "CANCELLED"
        assert len(await asyncio.wait_for(followed, 60)) > 0


async def names_of_events(client: AsyncClient) -> list[str]:
    return [event.name async for event in client.follow_events("ours")]
