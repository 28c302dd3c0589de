"""Readers of streams that take nothing, on a real socket: the master keeps little for them, and for a bounded
time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from master_service.api import server as api_server
from master_service.api import server_sent
from master_service.api.app import make_api
from master_service.api.routes.logs import LogSource
from master_service.api.server import Connections, Server
from master_service.core.changes import Event
from tests.equipment.replaced import replaced
from tests.equipment.uvicorn_server import served
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, running, spec_of
from trireme_shared.platform.runtime import log_files

LINES = 200_000  # of 100 bytes
BUFFER_BYTES = 8 << 10  # of the kernel, at each end
LIMIT_S = 30.0


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Any, Server, Connections, int]]:
    """The application, its server, the server's connections, and the port."""
    async with running(MasterCluster(spec_of()), "t1") as master:
        begun = master.term.job.events.newest
        master.events.add([Event("told", "x" * 900, {"number": number}) for number in range(200)])
        await until(lambda: master.term.job.events.newest == begun + 200, "the events to be in etcd", LIMIT_S)
        api, connections = make_api(master, LogSource((str(folder),))), Connections()
        server = Server(api, connections)
        with closing(socket.socket()) as listener:
            # an accepted one has it too
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            listener.bind(("127.0.0.1", 0))
            async with served(server, listener) as port:
                yield api, server, connections, port


def waiting_bytes(server: Server) -> int:
    """What the process holds for its readers, beyond the kernel's buffers."""
    return sum(each.transport.get_write_buffer_size() for each in server.server_state.connections)  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["events/stream", "logs/trainer-0/stream?after=0"])
async def test_a_reader_that_takes_nothing_costs_one_page_for_a_bounded_time_and_is_cut(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "trainer-0.log").write_bytes((b"y" * 99 + b"\n") * LINES)
    read, pread, most = 0, os.pread, 0

    def counted(descriptor: int, size: int, place: int) -> bytes:
        nonlocal read
        read += size
        return pread(descriptor, size, place)

    with (
        replaced(log_files.os, "pread", counted),
        replaced(server_sent, "SLOW_S", 0.5),  # type: ignore[arg-type]
        replaced(server_sent, "HEARTBEAT_S", 0.2),  # type: ignore[arg-type]
        replaced(api_server, "CLOSING_S", 0.2),  # type: ignore[arg-type]
    ):
        async with serving(tmp_path) as (api, server, connections, port):
            with closing(socket.socket()) as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                reader.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(reader, ("127.0.0.1", port))
                await loop.sock_sendall(
                    reader, f"GET /v1/jobs/j/{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
                )
                await until(lambda: api.state.streams.open == 1, "the stream to be open", LIMIT_S)
                async with asyncio.timeout(LIMIT_S):
                    while connections.by_peer:
                        most = max(most, waiting_bytes(server))
                        await asyncio.sleep(0.005)
                assert api.state.streams.open == 0
    assert 0 < most < 2 << 20
    assert read < 2 << 20


async def test_a_reader_that_takes_what_comes_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_bytes((b"y" * 99 + b"\n") * (LINES // 20))
    with replaced(server_sent, "SLOW_S", 0.5):  # type: ignore[arg-type]
        async with serving(tmp_path) as (_, _, _, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/jobs/j/logs/trainer-0/stream?after=0 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            size = (tmp_path / "trainer-0.log").stat().st_size
            async with asyncio.timeout(LIMIT_S):
                while await reader.readline() != f"id: {size}\n".encode():
                    pass
            writer.close()
