"""Health and metrics of a member by HTTP, for members that serve nothing else.

/healthz, /readyz ─► nobody is asked      /metrics ─► viewer      all other paths ─► 404
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from trireme_shared.platform.runtime.http import hide_implementation
from trireme_shared.platform.security.access import CHALLENGE, Access, Asked
from trireme_shared.platform.security.listening import Arrivals, listening
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import TriremeError, Unauthorized

PER_PEER = 64
KEEP_ALIVE_S = 120.0  # longer than the usual times between two requests of Prometheus
SHUTDOWN_S = 1.0


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class StatusServer:
    """`missing`: why the member is not ready; "": it is. `beside`: what else /readyz says, in time for who
    asks; it changes nothing about whether the member is ready. The metrics of the process come with those of
    `collector`."""

    def __init__(
        self,
        access: Access,
        collector: Collector,
        missing: Callable[[], str],
        beside: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
        *,
        per_peer: int = PER_PEER,
    ) -> None:
        self._access, self._collector, self._missing, self._beside = access, collector, missing, beside
        self.arrivals = Arrivals(per_peer=per_peer)

    def __repr__(self) -> str:
        return f"<StatusServer: {self.arrivals!r}>"

    @asynccontextmanager
    async def serving(self, host: str, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
        """The port. `port` 0: a free one. Raises CallerError if it is taken."""
        app = web.Application()
        app.on_response_prepare.append(hide_implementation)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=SHUTDOWN_S
        )
        async with listening(runner, self.arrivals, host, port, tls) as bound:
            yield bound

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        beside = await self._beside() if self._beside is not None else {}
        if missing := self._missing():
            return web.json_response({"status": "waiting", "reason": missing, **beside}, status=503)
        return web.json_response({"status": "ready", **beside})

    async def _metrics(self, request: web.Request) -> web.Response:
        ends = (request.get_extra_info("sockname"), request.get_extra_info("peername"))
        asked = Asked.of(request.method, request.headers, *ends)
        try:
            self._access.admit(asked, Role.VIEWER)
        except TriremeError as error:
            headers = {"WWW-Authenticate": CHALLENGE} if isinstance(error, Unauthorized) else None
            return web.json_response(error.to_map(), status=error.status, headers=headers)
        self.arrivals.admit(request.transport)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")
