"""The master's server on a real socket: connections that send nothing, half a request, too large a head, or
are too many."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from structlog.testing import capture_logs

from master_service.api.app import make_api, make_app
from master_service.api.server import Connections, Server
from tests.equipment.uvicorn_server import served
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, Storage, running, spec_of
from trireme_shared.protocol.records import AcquireTask, FailTask, UserFailure

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF_HEAD = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-mo"
HALF_BODY = (
    b"POST /v1/task-leases HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: 50\r\n\r\n{"
)
CUT_S = 20.0  # on a busy machine


@asynccontextmanager
async def serving(connections: Connections) -> AsyncIterator[int]:
    """The port."""
    async with running(MasterCluster(spec_of()), "t1") as master:
        server = Server(make_app(master), connections)
        async with served(server) as port:
            yield port
        assert connections.by_peer == {}


async def rest_of(port: int, *sent: bytes) -> bytes:
    """What comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(CUT_S):
            for number, part in enumerate(sent):
                writer.write(part)
                if number + 1 < len(sent):
                    await reader.readuntil(b'"}')
            try:
                return await reader.read()
            except ConnectionResetError:
                return b""
    except TimeoutError:
        raise AssertionError(f"the connection is open {CUT_S} s after {sent!r}") from None
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent", [(b"",), (HALF_HEAD,), (HALF_BODY,), (HEALTH, HALF_HEAD), (HEALTH, HALF_BODY)]
)
async def test_a_connection_without_a_whole_request_is_cut(sent: tuple[bytes, ...]) -> None:
    async with serving(Connections(request_s=0.2)) as port:
        assert await rest_of(port, *sent) == b""


async def test_no_answer_says_which_program_gives_it() -> None:
    async with serving(Connections(request_s=0.2)) as port:
        for sent in (HEALTH, HEALTH.replace(b"/healthz", b"/nothing"), b"no request\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            assert b"server:" not in head.lower(), head


async def test_a_long_poll_outlives_the_limit_of_a_request() -> None:
    async def events(port: int, query: str) -> bytes:
        ask = f"GET /v1/events?{query} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        return await rest_of(port, ask.encode())

    async with serving(Connections(request_s=0.2)) as port:
        newest = json.loads((await events(port, "after=0")).split(b"\r\n\r\n", 1)[1])["newest"]
        assert b"200 OK" in await events(port, f"after={newest}&wait_s=1")


async def test_a_head_beyond_the_bound_is_refused() -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: "
    async with serving(Connections(head_bytes=4096)) as port:
        assert b" 431 " in await rest_of(port, head + b"x" * 5000)
        body = (
            b"POST /v1/task-leases HTTP/1.1\r\nhost: localhost\r\nconnection: "
            b"close\r\ncontent-length: 20000\r\n\r\n" + b" " * 20000
        )
        answer = await rest_of(port, body)
        assert answer.startswith(b"HTTP/1.1 4")
        assert b" 431 " not in answer


async def test_a_peer_has_a_bounded_number_of_connections() -> None:
    async with serving(Connections(per_peer=3)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        try:
            for reader, writer in held:
                writer.write(HEALTH)
                assert b"200 OK" in await reader.readuntil(b'"}')
            with capture_logs() as logs:
                for _ in range(5):
                    assert await rest_of(port, HEALTH) == b""
            # not a line each
            assert [line["refused"] for line in logs if line["event"] == "connection_refused"] == [1]
        finally:
            for _, writer in held:
                writer.close()


@pytest.mark.parametrize("hot", [True, False])
async def test_no_task_is_given_to_a_request_whose_caller_is_gone(hot: bool) -> None:
    async with running(MasterCluster(spec_of(), Storage(tasks=1)), "t1", "t2") as master:
        server = Server(make_app(master) if hot else make_api(master))
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            try:
                await until(lambda: server.started, "the server to start", 10)
                held = await master.acquire_task(AcquireTask(trainer="t1", request="held", generation=1))
                assert held.task is not None
                body = AcquireTask(trainer="t2", request="gone", generation=1, wait_s=20).to_bytes()
                head = (
                    b"POST /v1/task-leases HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
                    b"application/json\r\ncontent-length: %d\r\n\r\n"
                )
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(head % len(body) + body)
                await until(lambda: len(master.term.asks) == 1, "it to wait", CUT_S)
                writer.close()
                await until(lambda: len(master.term.asks) == 0, "it to be forgotten", CUT_S)
                failure = UserFailure(error_type="ValueError", message="no")
                await master.fail_task(held.task.task_id, FailTask(trainer="t1", attempt=1, failure=failure))
                assert master.job.training.pending == {}
            finally:
                server.should_exit = True
                await serving
