"""The HTTP server of one pserver: the routes of a `Pserver`, on TCP and, if configured, a UNIX socket."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from trireme_shared.platform.runtime.http import hide_implementation
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.listening import Arrivals, listening
from trireme_shared.protocol.errors import CallerError
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.data_plane import health, http
from trireme_shared.serving.data_plane.guard import guard
from trireme_shared.serving.data_plane.http_frames import TimeLimits

READ_BUFFER_BYTES = 1 << 20
ARRIVALS = web.AppKey("arrivals", Arrivals)
KEEP_ALIVE_S = 3600.0  # trainers keep their connection while they compute
SHUTDOWN_S = 2.0
SOCKET_PATH_BYTES = 107  # a kernel's limit


@dataclass(frozen=True, slots=True)
class Listening:
    """`port`: the one really bound."""

    port: int
    uds: str = ""


def make_app(
    pserver: BlockServer, access: Access | None = None, *, stall_s: float = 30.0, idle_s: float = 900.0
) -> web.Application:
    """`access` None: it needs no token and answers at loopback names only."""
    access, arrivals = access or Access(), Arrivals()
    app = web.Application(middlewares=[guard(access, pserver.incarnation, arrivals)])
    app[ARRIVALS] = arrivals
    app[http.PSERVER], app[http.ACCESS] = pserver, access
    app[http.TIME_LIMITS] = TimeLimits(stall_s, idle_s)
    app[http.STREAMS] = http.Streams()
    app.on_response_prepare.append(hide_implementation)
    app.on_shutdown.append(http.close_streams)
    app.add_routes(http.routes)
    app.add_routes(health.routes)
    return app


@asynccontextmanager
async def serving(
    app: web.Application, host: str, port: int, uds: str = "", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Listening]:
    """Serve until the `with` block ends; the socket `uds` accepts our own user only, without `tls`. Raises CallerError if the port is taken."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # so the pull of a dead trainer stops waiting
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,  # a few KiB could become a GiB; bodies come as they are
    )
    beside = [partial(_bind_path, uds)] if uds else []
    try:
        async with listening(runner, app[ARRIVALS], host, port, tls, beside) as bound:
            yield Listening(port=bound, uds=uds)
    finally:
        if uds:
            Path(uds).unlink(missing_ok=True)  # noqa: ASYNC240


def socket_path(uds: str, incarnation: str) -> str:
    """The socket that TRIREME_UDS asks for. In a folder each incarnation has a name of its own, so a trainer never reaches a
    successor of the process it means."""
    return str(Path(uds) / f"{incarnation}.sock") if uds and Path(uds).is_dir() else uds


def _bind_path(uds: str) -> socket.socket:
    if len(os.fsencode(uds)) > SOCKET_PATH_BYTES:
        msg = f"the UNIX socket {uds} has a path of {len(os.fsencode(uds))} bytes, at most {SOCKET_PATH_BYTES} are possible; choose a shorter TRIREME_UDS"
        raise CallerError(msg)
    listener = socket.socket(socket.AF_UNIX)
    try:
        Path(uds).unlink(missing_ok=True)  # a killed process left it behind
        listener.bind(uds)
        Path(uds).chmod(0o600)  # before it listens, so no other user can have connected
    except OSError as error:
        listener.close()
        msg = f"cannot listen on the UNIX socket {uds}: {error.strerror}; choose another TRIREME_UDS"
        raise CallerError(msg) from error
    return listener
