"""The UNIX socket of a server of blocks: its path, and what happens when somebody deletes it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.equipment.waiting import until
from tests.pserver_service.jobs import JOB, pull_request
from tests.shared.serving.data_plane.servers import TOKEN, accepting
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.platform.security.private_files import SOCKET_PATH_BYTES, SocketFolder
from trireme_shared.protocol.errors import CallerError, PeerError
from trireme_shared.protocol.records import PserverMember
from trireme_shared.serving.data_plane import server as server_module
from trireme_shared.serving.data_plane.server import make_app, serving, socket_path
from trireme_shared.serving.pserver import Pserver

NAME = "host-0-pserver-0-0123456789ab"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)


@pytest.fixture
def folder():
    made = SocketFolder("trireme-test-")
    yield made
    made.remove()


@asynccontextmanager
async def served(uds: str, *, lenient: bool = True):
    app = make_app(Pserver(JOB, NAME), accepting(TOKEN))
    async with serving(app, "127.0.0.1", 0, uds, lenient=lenient) as listening:
        url = f"http://127.0.0.1:{listening.port}"
        host = socket.gethostname()
        yield PserverMember(index=0, url=url, incarnation=NAME, host=host, pid=1, uds=listening.uds)


@asynccontextmanager
async def client_of(member: PserverMember):
    client = StreamPserver(member, TOKEN, stall_s=20)
    try:
        yield client
    finally:
        await client.close()


async def connected_over(member: PserverMember) -> str:
    """`unix` or `tcp`: how a client that comes now reaches the member, by stream and by request."""
    async with client_of(member) as client:
        await client.info()
        return await streamed_over(client)


async def streamed_over(client: StreamPserver) -> str:
    with suppress(PeerError):  # it has no parameters, and says so over a stream
        await client.pull(pull_request(0, [0]), lambda _: memoryview(b""))
    family = client.stream.transport.get_extra_info("socket").family
    return "unix" if family is socket.AF_UNIX else "tcp"


def test_the_path_fits_whatever_the_process_is_called(tmp_path):
    long = f"{'h' * 63}-pserver-0-0123456789ab"
    deep = tmp_path / ("d" * (SOCKET_PATH_BYTES - len(str(tmp_path)) - len(long) - 4))
    for folder in (f"{deep}/", f"{tmp_path}/"):
        path = socket_path(folder, long)
        assert len(path) <= SOCKET_PATH_BYTES
        assert path.startswith(folder)
        assert path != socket_path(folder, long[:-1])
    assert socket_path(str(tmp_path), "pserver-0-ab") == f"{tmp_path}/pserver-0-ab.sock"
    assert socket_path(str(tmp_path / "own.sock"), NAME) == str(tmp_path / "own.sock")
    assert socket_path("", NAME) == ""


async def test_a_deleted_socket_is_made_again_and_peers_come_by_the_address_meanwhile(folder):
    async with served(socket_path(f"{folder.path}/", NAME)) as member:
        assert await connected_over(member) == "unix"
        shutil.rmtree(folder.path)
        assert await connected_over(member) == "tcp"
        assert folder.look()
        await until(lambda: Path(member.uds).exists(), "the socket to be made again")
        assert await connected_over(member) == "unix"
        Path(member.uds).unlink()
        await until(lambda: Path(member.uds).exists(), "the socket to be made again")
        assert await connected_over(member) == "unix"
    assert not Path(member.uds).exists()


async def test_requests_of_a_client_that_had_the_socket_go_on_by_the_address(folder):
    async with (
        served(socket_path(f"{folder.path}/", NAME)) as member,
        client_of(member) as client,
    ):
        await client.info()
        connector = client.session().connector
        shutil.rmtree(folder.path)
        await connector.close()  # as after an idle hour
        await client.info()


async def test_a_member_that_starts_while_the_folder_is_gone_serves_by_the_address_and_then_by_the_socket(
    folder,
):
    shutil.rmtree(folder.path)
    async with served(socket_path(f"{folder.path}/", NAME)) as member:
        assert not folder.path.exists()
        assert await connected_over(member) == "tcp"
        folder.look()
        await until(lambda: Path(member.uds).exists(), "the socket")
        assert await connected_over(member) == "unix"


async def test_a_socket_that_is_another_processes_is_left_for_the_address(folder):
    uds = socket_path(f"{folder.path}/", NAME)
    async with served(uds) as member:
        Path(uds).unlink()
        server_module.LOOK_S = 60.0
        other = make_app(Pserver(JOB, "another"), accepting(TOKEN))
        async with serving(other, "127.0.0.1", 0, uds), client_of(member) as client:
            assert await streamed_over(client) == "tcp"


async def test_a_socket_that_a_user_has_named_must_be_possible(tmp_path):
    with pytest.raises(CallerError, match=r"cannot listen on the UNIX socket .*choose another TRIREME_UDS"):
        async with served(str(tmp_path / "missing" / "own.sock"), lenient=False):
            pass
    await asyncio.sleep(0)
