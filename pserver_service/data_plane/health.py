"""GET /healthz (the process serves), /readyz (it has parameters), /metrics (Prometheus text)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pserver_service.data_plane.http import PSERVER
from pserver_service.pserver import Pserver

routes = web.RouteTableDef()


class Collector:
    """Reads the metrics of a pserver when /metrics is requested."""

    def __init__(self, pserver: Pserver) -> None:
        self._pserver = pserver

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._pserver.counters).items():
            yield CounterMetricFamily(f"trireme_pserver_{name}", name.replace("_", " "), value=value)
        store = self._pserver.store
        gauges = {"generation": self._pserver.generation, "ready": int(store is not None)}
        if store is not None:
            gauges |= {
                "blocks": len(store.blocks),
                "parameter_bytes": store.bytes,
                "version_lowest": store.lowest,
                "version_highest": store.highest,
                "pool_bytes": store.pool.allocated_bytes,
                "pool_free_bytes": store.pool.free_bytes,
            }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"trireme_pserver_{name}", name.replace("_", " "), value=value)


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "incarnation": request.app[PSERVER].incarnation})


@routes.get("/readyz")
async def readyz(request: web.Request) -> web.Response:
    pserver = request.app[PSERVER]
    if pserver.index < 0:
        return web.json_response({"status": "waiting", "reason": "no index claimed yet"}, status=503)
    if pserver.store is None:
        return web.json_response({"status": "waiting", "reason": "no parameters yet"}, status=503)
    return web.json_response({"status": "ready", "index": pserver.index})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(request.app[PSERVER]))
    return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")
