"""What a trainer answers by HTTP: /healthz tells a dead one from a slow one, /metrics is for Prometheus.

/healthz ─► nobody is asked      /metrics ─► viewer
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.errors import TriremeError, Unauthorized
from shared.runtime.http import hide_implementation
from shared.security.access import CHALLENGE, Access, Asked
from shared.security.tokens import Role
from trainer_agent.agent import Agent

COUNTERS = {  # field of Done -> (name, help)
    "steps": ("steps", "shares of steps that were acknowledged (asynchronous: pushes)"),
    "records": ("records", "records in them"),
    "skipped_records": ("skipped_records", "records left out: their loss or gradient was not finite"),
    "tasks": ("tasks", "tasks that it has finished"),
}


class StatusPages:
    """`agent`: once there is one."""

    def __init__(self, access: Access) -> None:
        self.agent: Agent | None = None
        self._access = access

    def collect(self) -> Iterator[Metric]:
        agent = self.agent
        yield GaugeMetricFamily("trireme_trainer_ready", "1 once its model is built", value=int(agent is not None))
        if agent is None:
            return
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"trireme_trainer_{name}", text, value=getattr(agent.done, field))
        if (lane_s := agent.pace.lane_s) is not None:
            text = "synchronous: forward and backward of one lane, the median of the last ones"
            yield GaugeMetricFamily("trireme_trainer_lane_seconds", text, value=lane_s)

    @asynccontextmanager
    async def serving(self, host: str, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
        """The port. `port` 0: a free one."""
        app = web.Application()
        app.on_response_prepare.append(hide_implementation)
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=tls)
            await site.start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def _alive(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        asked = Asked.of(request.method, request.headers, request.get_extra_info("sockname"))
        try:
            self._access.admit(asked, Role.VIEWER)
        except TriremeError as error:
            headers = {"WWW-Authenticate": CHALLENGE} if isinstance(error, Unauthorized) else None
            return web.json_response(error.to_map(), status=error.status, headers=headers)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")
