"""Connections that do not finish their TLS handshake, at all kinds of servers and on both event loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from master_service.api.server import Connections, Server
from tests.equipment.uvicorn_server import served
from tests.pserver_service.jobs import JOB
from trireme.pool.host_status import HostMetrics
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.security import authority
from trireme_shared.platform.security import tls as tls_files
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tls import Tls
from trireme_shared.serving.data_plane.server import ARRIVALS, make_app, serving
from trireme_shared.serving.pserver import Pserver

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
CUT_S = 20.0  # on a busy machine; without a limit of ours it takes 60 s
PER_PEER = 3

Serve = Callable[[ssl.SSLContext], AbstractAsyncContextManager[int]]
NewLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return made_in(tmp_path_factory.mktemp("tls"))


def made_in(folder: Path) -> Tls:
    """Of an authority of its own."""
    authority.create_authority(folder)
    authority.issue(folder, "trireme", ("127.0.0.1",), 1)
    return Tls(*(str(folder / name) for name in ("ca.pem", "trireme.pem", "trireme-key.pem")))


async def _healthy(_: object, __: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def master(context: ssl.SSLContext) -> AsyncIterator[int]:
    connections = Connections(per_peer=PER_PEER)
    server = Server(_healthy, connections, tls=context)  # type: ignore[arg-type]
    async with served(server) as port:
        yield port
    assert connections.by_peer == {}


@asynccontextmanager
async def pserver(context: ssl.SSLContext) -> AsyncIterator[int]:
    app = make_app(Pserver(JOB, "ps-1", index=0))
    app[ARRIVALS].per_peer = PER_PEER
    async with serving(app, "127.0.0.1", 0, tls=context) as listening:
        yield listening.port


@asynccontextmanager
async def status(context: ssl.SSLContext) -> AsyncIterator[int]:
    server = StatusServer(Access(), HostMetrics(), str, per_peer=PER_PEER)
    async with server.serving("127.0.0.1", 0, context) as port:
        yield port


async def is_healthy(port: int, context: ssl.SSLContext) -> bool:
    """Whether a client that means well gets an answer."""
    try:
        async with asyncio.timeout(CUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(HEALTH)
            answer = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
    except OSError:
        return False
    return b" 200 " in answer


async def is_cut(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(CUT_S):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


def half_hello(context: ssl.SSLContext) -> bytes:
    """The first half of what a client says first."""
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="127.0.0.1").do_handshake()
    whole = out.read()
    return whole[: len(whole) // 2]


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
SERVERS = pytest.mark.parametrize("served", [master, pserver, status])


@LOOPS
@SERVERS
def test_who_does_not_finish_its_handshake_is_cut(
    served: Serve, loop: NewLoop, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme_shared.platform.security.listening.HANDSHAKE_S", 0.3)

    async def bother() -> None:
        server, client = contexts(tls)
        async with served(server) as port:
            said = [b"", half_hello(client), HEALTH[:3]]
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in said]
            for (_, writer), words in zip(held, said, strict=True):
                writer.write(words)
            assert [await is_cut(reader) for reader, _ in held] == [True] * len(said)
            monkeypatch.setattr("trireme_shared.platform.security.listening.HANDSHAKE_S", 60.0)
            assert await is_healthy(port, client)
            for _, writer in held:
                writer.close()

    run(bother(), loop)


@LOOPS
@SERVERS
def test_handshakes_count_among_the_connections_of_their_peer(
    served: Serve, loop: NewLoop, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme_shared.platform.security.listening.HANDSHAKE_S", 60.0)

    async def bother() -> None:
        server, client = contexts(tls)
        async with served(server) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PER_PEER)]
            assert not await is_healthy(port, client)
            for _, writer in held:
                writer.close()
            async with asyncio.timeout(CUT_S):
                while not await is_healthy(port, client):  # it has not heard of their end yet
                    await asyncio.sleep(0.05)
            left = await asyncio.open_connection("127.0.0.1", port)
        assert await is_cut(left[0]), "the server has ended"
        left[1].close()

    run(bother(), loop)


@LOOPS
@SERVERS
def test_a_renewed_certificate_is_served_to_the_next_client_without_a_restart(
    served: Serve, loop: NewLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_S", 0.0)

    async def serial() -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of[0], ssl=client)
        found: dict[str, str] = writer.get_extra_info("peercert")
        writer.close()
        return found["serialNumber"]

    async def renew() -> None:
        async with served(server) as port:
            port_of.append(port)
            before = await serial()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            made_in(tmp_path / "next")
            for each in (tmp_path / "next").iterdir():
                each.replace(tmp_path / "tls" / each.name)
            assert await serial() != before
            writer.write(HEALTH)
            async with asyncio.timeout(CUT_S):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n"), "connections that were there go on"
            writer.close()

    port_of: list[int] = []
    server, client = contexts(made_in(tmp_path / "tls"))
    run(renew(), loop)


def contexts(tls: Tls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = tls.server(), tls.client()
    assert server is not None
    assert client is not None
    return server, client


def run(bother: Coroutine[None, None, None], loop: NewLoop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bother)
