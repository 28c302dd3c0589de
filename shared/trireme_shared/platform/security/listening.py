"""A port of a member: over TLS or in clear text, with limits for the connections of each peer. For services by aiohttp."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from trireme_shared.platform.security.arrivals import Arrivals
from trireme_shared.platform.security.handshakes import TlsServer
from trireme_shared.protocol.errors import CallerError


@asynccontextmanager
async def listening(
    runner: web.AppRunner,
    arrivals: Arrivals,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    beside: Sequence[Callable[[], socket.socket]] = (),
) -> AsyncIterator[int]:
    """The port, until the `with` block ends; then `runner` is cleaned up. `port` 0: a free one. `beside` make sockets that are served
    as well, never over `tls`. Raises CallerError if the port is taken, and what `beside` raise."""
    await runner.setup()
    assert runner.server is not None
    over_tls = None
    try:
        listener = _bind(host, port)
        if tls is None:
            await web.SockSite(runner, listener).start()
        else:
            over_tls = TlsServer(listener, tls, runner.server, per_peer=arrivals.per_peer, held=arrivals.held)
        for bind in beside:
            await web.SockSite(runner, bind()).start()
        looking = asyncio.ensure_future(arrivals.run(runner.server))
        try:
            yield listener.getsockname()[1]
        finally:
            looking.cancel()
            await asyncio.wait([looking])
    finally:
        if over_tls is not None:
            over_tls.close()
            await over_tls.wait_closed()
        await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        msg = f"cannot listen on {host} port {port}: {error.strerror}; choose another TRIREME_HOST or TRIREME_PORT"
        raise CallerError(msg) from error
