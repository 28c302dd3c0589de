"""Health and metrics of members that serve nothing else."""

from __future__ import annotations

import asyncio

import pytest

from trireme.pool.host_status import HostMetrics
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.security import listening
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Role, TokenRecord, Tokens, TokenTable, digest_of
from trireme_shared.protocol.errors import CallerError

VIEWER = TokenRecord(name="v", role=Role.VIEWER, sha256=digest_of("reads"))
METRICS = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n\r\n"


async def answer_to(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bytes:
    stream[1].write(request)
    async with asyncio.timeout(10):
        return await stream[0].readuntil(b"\r\n")


async def test_who_shows_no_token_is_cut_off_and_a_viewer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "LOOK_S", 0.05)
    server = StatusServer(Access(Tokens(table=TokenTable(tokens=(VIEWER,)))), HostMetrics(), str)
    server.arrivals.patience_s = 0.5
    async with server.serving("127.0.0.1", 0, None) as port:
        viewer, stranger, silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert b" 200 " in await answer_to(viewer, METRICS % b"reads")
        assert b" 401 " in await answer_to(stranger, METRICS % b"wrong")
        async with asyncio.timeout(10):
            for reader, _ in (stranger, silent):
                with pytest.raises(ConnectionError):
                    while await reader.read(1 << 16):
                        pass
                    raise ConnectionError("closed")
        async with asyncio.timeout(10):
            while b"trireme_host_ready" not in (await viewer[0].readline()):
                pass
        viewer[1].write(METRICS % b"reads")
        async with asyncio.timeout(10):
            await viewer[0].readuntil(b"HTTP/1.1 200 ")
        for _, writer in (viewer, stranger, silent):
            writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    async with StatusServer(Access(), HostMetrics(), str).serving("127.0.0.1", 0, None) as port:
        with pytest.raises(CallerError, match=f"127.0.0.1 port {port}: .*TRIREME_PORT"):
            async with StatusServer(Access(), HostMetrics(), str).serving("127.0.0.1", port, None):
                pass
