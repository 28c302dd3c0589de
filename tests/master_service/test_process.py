"""`python -m master_service` as a process, on a real etcd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.equipment.forked import clean_environment, warm_server
from tests.master_service.cluster import KEYS, spec_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.protocol.records import JobSpec, MasterAddress, MasterLock
from trireme_shared.protocol.records.datasets import TextLines

pytestmark = pytest.mark.processes
START_S = 60.0  # of two interpreters on a busy machine, and of a takeover


@asynccontextmanager
async def started(**settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIREME_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "master_service",
        env=environment | {f"TRIREME_{name.upper()}": value for name, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(START_S):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def refused(folder: Path, **settings: str) -> tuple[int, str]:
    """Its exit code and what it said; forked, since only its words matter."""
    environment = clean_environment() | {f"TRIREME_{name.upper()}": value for name, value in settings.items()}
    with tempfile.TemporaryFile() as errors:
        process = warm_server().start(
            "master_service", (), folder, environment, errors.fileno(), errors.fileno()
        )
        code = await asyncio.to_thread(process.wait, 20)
        errors.seek(0)
        return code, errors.read().decode()


async def leader(etcd: Etcd, other_than: str = "") -> MasterAddress:
    async with asyncio.timeout(START_S):
        while True:
            found = await etcd.get(KEYS.master_address)
            if found is not None:
                address = MasterAddress.model_validate_json(found.value)
                if address.url != other_than:
                    return address
            await asyncio.sleep(0.05)


def job_in(folder: Path) -> JobSpec:
    (folder / "train.txt").write_text("a\nb\nc\nd\n")
    spec = spec_of(
        dataset=TextLines(str(folder / "train.txt")), storage=str(folder / "storage"), records_per_task=2
    )
    (folder / "spec.json").write_bytes(spec.to_bytes())
    return spec


async def test_a_master_serves_a_standby_takes_over_and_sigterm_hands_over(
    tmp_path: Path, real_etcd: Etcd, embedded_etcd: EmbeddedEtcd
) -> None:
    job_in(tmp_path)
    common = {"job": "j", "etcd": embedded_etcd.url, "spec": str(tmp_path / "spec.json"), "token": "secret"}
    headers = {"Authorization": "Bearer secret"}
    async with started(**common, name="m1") as first, started(**common, name="m2") as second:
        address = await leader(real_etcd)
        lock = await real_etcd.get(KEYS.master_lock)
        assert lock is not None
        holder = MasterLock.model_validate_json(lock.value)
        leading, standby = (first, second) if holder.master.startswith("m1-") else (second, first)
        async with httpx.AsyncClient(headers=headers, trust_env=False) as client, asyncio.timeout(30):
            while (answer := await client.get(f"{address.url}/v1/job")).status_code != 200:
                await asyncio.sleep(0.05)
            assert answer.json()["progress"]["records_total"] == 4
            leading.kill()
            successor = await leader(real_etcd, other_than=address.url)
            assert successor.term > address.term
            while (await client.get(f"{successor.url}/readyz")).json().get("status") != "ok":
                await asyncio.sleep(0.05)
        standby.send_signal(signal.SIGTERM)
        code, errors = await ended(standby)
        assert code == 0, errors
        assert await real_etcd.get(KEYS.master_lock) is None


async def test_settings_and_specs_that_cannot_be_used_are_one_clear_line(
    tmp_path: Path, real_etcd: Etcd, embedded_etcd: EmbeddedEtcd
) -> None:
    spec = job_in(tmp_path)
    code, errors = await refused(tmp_path)
    assert (code, "Traceback" in errors, "set TRIREME_JOB" in errors) == (2, False, True)
    code, errors = await refused(tmp_path, job="j", etcd=embedded_etcd.url)
    assert code == 1
    assert "job j has no spec in etcd yet; start its first master with TRIREME_SPEC" in errors
    assert "Traceback" not in errors
    (tmp_path / "broken.json").write_text("{}")
    code, errors = await refused(
        tmp_path, job="j", etcd=embedded_etcd.url, spec=str(tmp_path / "broken.json")
    )
    assert (code, "Traceback" in errors, "is no job spec" in errors) == (1, False, True)
    await real_etcd.put(KEYS.spec, spec.model_copy(update={"epochs": 9}).to_bytes())
    code, errors = await refused(tmp_path, job="j", etcd=embedded_etcd.url, spec=str(tmp_path / "spec.json"))
    assert (code, "Traceback" in errors) == (1, False)
    assert "job j exists with another spec: epochs is 9 there and 1 here" in errors


async def test_a_port_in_use_is_named(tmp_path: Path, embedded_etcd: EmbeddedEtcd) -> None:
    job_in(tmp_path)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code, errors = await refused(
            tmp_path, job="j", etcd=embedded_etcd.url, spec=str(tmp_path / "spec.json"), port=str(port)
        )
        assert (code, "Traceback" in errors) == (1, False)
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in errors
