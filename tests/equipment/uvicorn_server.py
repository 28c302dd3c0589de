"""A master's HTTP server on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from master_service.api.server import Server
from tests.equipment.waiting import until


@asynccontextmanager
async def served(server: Server, listener: socket.socket | None = None) -> AsyncIterator[int]:
    """The port. `listener`: one that is bound; default: a free port of this machine."""
    with listener or socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        task = asyncio.ensure_future(server.serve(sockets=[bound]))
        try:
            await until(lambda: server.started, "the server to start", 10)
            yield port
        finally:
            server.should_exit = True
            await task
