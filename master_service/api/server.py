"""Serves the REST application: uvicorn, without its signal handlers (trireme_shared.platform.runtime.service
has them), one write an answer.

uvicorn writes head and body of an answer apart, and uvloop passes each to the kernel at once: twice the
system calls, and the client wakes up twice. `Connection` joins the writes of one turn of the event loop.

Connections are bounded: by the time that a request or a TLS handshake may take, by the bytes of a request's
head, by their number for each peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.security.listening import TlsServer

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # no httptools on this platform
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]

CLOSING_S = 2
PER_PEER = 4096  # and at most half of the files that the process may open: etcd needs some
TELL_S = 5.0  # refused connections are logged together, so often at most
COUNTS_HEADS = hasattr(HttpProtocol, "on_headers_complete")  # h11 has a limit of its own
TOO_LARGE_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_NOTHING = object()

log = telemetry.logger("server")


@dataclass(slots=True)
class Connections:
    """Their limits, and how many each peer has. A connection is cut if a request (the first one counts from
    the start of the connection) has not arrived after one to two times `request_s`. A peer is an address:
    many trainers may share one."""

    request_s: float = 10.0
    head_bytes: int = 64 * 1024
    per_peer: int = field(default_factory=lambda: min(PER_PEER, _open_files() // 2))
    by_peer: Counter[str] = field(default_factory=Counter)
    refused: telemetry.Tally = field(default_factory=telemetry.Tally)


class Server(uvicorn.Server):
    """`serve(sockets)` until `should_exit`; with `tls`, https alone."""

    def __init__(
        self, app: ASGIApp, connections: Connections | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connections, self._tls = connections or Connections(), tls
        config = uvicorn.Config(
            app,
            http=partial(Connection, self._connections),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSING_S,
        )
        config.load()
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own cannot limit handshakes."""
        if self._tls is None:
            await super().startup(sockets)
            return
        if not sockets:
            raise ValueError("https is served at sockets that listen")
        limits = self._connections

        def make() -> asyncio.Protocol:
            return Connection(limits, config=self.config, server_state=self.server_state, app_state={})

        self.servers = [
            TlsServer(each, self._tls, make, per_peer=limits.per_peer, held=lambda peer: limits.by_peer[peer])  # type: ignore[misc]
            for each in sockets
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Connection(HttpProtocol):
    """uvicorn's protocol with limits, over a transport that joins writes."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = connections
        self._head_bytes = 0
        self._peer: str | None = None  # once it was accepted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limits, address = self._limits, transport.get_extra_info("peername")
        peer = str(address[0]) if address else ""
        if limits.by_peer[peer] >= limits.per_peer:
            limits.refused.add()
            if refused := limits.refused.due(TELL_S):
                cause = f"it has {limits.per_peer} connections already"
                log.warning("connection_refused", peer=peer, refused=refused, cause=cause)
            transport.abort()
            return
        self._peer = peer
        limits.by_peer[peer] += 1
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]
        self.loop.call_later(limits.request_s, self._look, None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer is None:
            return
        by_peer = self._limits.by_peer
        by_peer[self._peer] -= 1
        if not by_peer[self._peer]:
            del by_peer[self._peer]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._limits.head_bytes and COUNTS_HEADS and not self.transport.is_closing():
            self.transport.write(TOO_LARGE_HEAD)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _look(self, before: object) -> None:
        """Every `request_s`: cut the connection if it has been waiting for the rest of the same request since
        the last time."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and self.timeout_keep_alive_task is None):
            arriving: object = cycle  # a head, after the request before
        else:
            arriving = cycle if cycle.more_body and not cycle.response_complete else _NOTHING
        if arriving is before and arriving is not _NOTHING:
            self.transport.abort()
            return
        self.loop.call_later(self._limits.request_s, self._look, arriving)


def _open_files() -> int:
    """How many files this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2 * PER_PEER if limit == resource.RLIM_INFINITY else limit


class _Joining:
    """A transport whose `write` takes effect in the next turn of the event loop, or before `close`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written: list[bytes] = []
        loop = asyncio.get_running_loop()
        self._call_soon, self._call_later = loop.call_soon, loop.call_later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        if self._transport.is_closing():  # a TLS transport that is closed twice has no protocol any more
            return
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():  # a reader that takes nothing would keep it open for ever
            self._call_later(CLOSING_S, self._transport.abort)

    def _flush(self) -> None:
        if self._written and not self._transport.is_closing():  # the peer may have gone meanwhile
            self._transport.write(b"".join(self._written))
        self._written.clear()
