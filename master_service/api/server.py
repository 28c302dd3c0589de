"""Serves the REST application: uvicorn, without its signal handlers (shared.runtime.service has them), one write an answer.

uvicorn writes head and body of an answer apart, and uvloop passes each to the kernel at once: twice the system calls, and the
client wakes up twice. `OneWrite` joins the writes of one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # no httptools on this platform
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]

CLOSING_S = 2


class Server(uvicorn.Server):
    """`serve(sockets)` until `should_exit`."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http=OneWrite,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSING_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class OneWrite(HttpProtocol):
    """uvicorn's protocol over a transport that joins writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]


class _Joining:
    """A transport whose `write` takes effect in the next turn of the event loop, or before `close`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written: list[bytes] = []
        self._call_soon = asyncio.get_running_loop().call_soon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._written:
            self._transport.write(b"".join(self._written))
            self._written.clear()
