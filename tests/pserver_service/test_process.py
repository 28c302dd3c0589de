"""`python -m pserver_service` as a process with a real etcd."""

import asyncio
import os
import signal
import stat
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.equipment.etcd.real import embedded_etcd
from tests.pserver_service.jobs import JOB
from tests.pserver_service.membership.test_index import SPEC
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import PserverMember

__all__ = ["embedded_etcd"]
KEYS = Keys(JOB)


async def start(*args: str, **environment: str) -> asyncio.subprocess.Process:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRIREME_")}
    command = (sys.executable, "-m", "pserver_service", *args)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, env=inherited | environment, stdout=pipe, stderr=pipe
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(80):
        out, err = await process.communicate()
    return process.returncode, (out + err).decode()


@pytest.fixture
def sockets():
    """A folder whose path is short wherever pytest's are: that of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="trireme-", dir="/tmp") as folder:
        yield Path(folder)


@asynccontextmanager
async def closing(etcd: Etcd):
    try:
        yield etcd
    finally:
        await etcd.close()


@pytest.mark.processes
async def test_a_pserver_claims_its_index_serves_and_gives_it_back(
    embedded_etcd: EmbeddedEtcd, sockets: Path
):
    async with closing(connect([embedded_etcd.url])) as etcd:
        settings = {"TRIREME_ETCD": embedded_etcd.url, "TRIREME_TOKEN": "boat", "TRIREME_UDS": str(sockets)}
        process = await start(TRIREME_JOB=JOB, **settings)
        try:
            await etcd.put(KEYS.spec, SPEC.to_bytes())
            await etcd.put(KEYS.pservers_desired, b"1")
            async with asyncio.timeout(80):
                while (found := await etcd.get(KEYS.pserver(0))) is None:
                    assert process.returncode is None, (await ended(process))[1]
                    await asyncio.sleep(0.05)
            member = PserverMember.model_validate_json(found.value)
            assert (member.index, member.pid, member.lease) == (0, process.pid, found.lease)
            async with aiohttp.ClientSession() as session, session.get(member.url + "/readyz") as answer:
                assert (answer.status, (await answer.json())["reason"]) == (503, "no parameters yet")
            assert [str(path) for path in sockets.iterdir()] == [member.uds]
            assert stat.S_IMODE(Path(member.uds).stat().st_mode) == 0o600
            process.send_signal(signal.SIGTERM)
            code, log = await ended(process)
            assert not list(sockets.iterdir())
            assert code == 0, log
            assert await etcd.get(KEYS.pserver(0)) is None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.processes
async def test_help_and_a_missing_setting_are_answered_at_once():
    code, text = await ended(await start("--help"))
    assert code == 0
    assert "TRIREME_JOB" in text
    assert await ended(await start()) == (2, "TRIREME_JOB: Field required\n")
