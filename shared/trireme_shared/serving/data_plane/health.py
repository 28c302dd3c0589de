"""GET /healthz (the process serves), /readyz (it has parameters), /metrics (Prometheus text)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.data_plane.http import PSERVER

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba
    from trireme_shared.tables.table import Table

routes = web.RouteTableDef()


COUNTERS = {  # field of Counters -> (name, help); base units at the end, prometheus_client adds _total
    "pushes": ("pushes", "pushes that began"),
    "pulls": ("pulls", "pulls that began"),
    "blocks_applied": ("applied_blocks", "pushed blocks that were applied"),
    "blocks_duplicate": ("duplicate_blocks", "pushed blocks that had been applied before"),
    "blocks_refused": ("refused_blocks", "pushed blocks that were refused"),
    "bytes_pushed": ("pushed_bytes", "payloads of pushed blocks"),
    "bytes_pulled": ("pulled_bytes", "payloads of pulled blocks"),
}


class Collector:
    """Reads the metrics of a pserver when /metrics is requested."""

    def __init__(self, pserver: BlockServer) -> None:
        self._pserver = pserver

    def collect(self) -> Iterator[Metric]:
        for field, (name, text) in COUNTERS.items():
            value = getattr(self._pserver.counters, field)
            yield CounterMetricFamily(f"trireme_pserver_{name}", text, value=value)
        store = self._pserver.store
        gauges = [
            ("generation", "the highest membership that it has seen", self._pserver.generation),
            ("ready", "1 if it has parameters", int(store is not None)),
        ]
        if store is not None:
            gauges += [
                ("blocks", "blocks that it owns", len(store.blocks)),
                ("parameter_bytes", "parameters that it owns", store.bytes),
                ("version_lowest", "steps applied to every block", store.lowest),
                ("version_highest", "steps applied to some block", store.highest),
                ("pool_bytes", "buffers for blocks, in use or free", store.pool.allocated_bytes),
                ("pool_free_bytes", "buffers for blocks that are free", store.pool.free_bytes),
            ]
        for name, text, number in gauges:
            yield GaugeMetricFamily(f"trireme_pserver_{name}", text, value=number)
        if (rows := self._pserver.rows_in_memory) is not None:
            yield from _of_tables(rows)


def _of_tables(rows: TableRows) -> Iterator[Metric]:
    """Counters count since the process took its rows."""
    families: list[tuple[GaugeMetricFamily | CounterMetricFamily, Callable[[Table], int]]] = [
        (_gauge("rows", "rows that have memory, expired ones included"), lambda table: table.rows),
        (_gauge("bytes", "memory of rows, their state and their index"), lambda table: table.bytes),
        (_counter("admitted_rows", "rows that appeared"), lambda table: table.counts.admitted),
        (_counter("evicted_rows", "rows that left"), lambda table: table.counts.evicted),
        (_counter("refused_gradients", "gradients of ids that had no row yet"), lambda table: table.counts.refused),
    ]
    for family, number in families:
        for table in rows.tables:
            family.add_metric([table.spec.name], number(table))
        yield family
    kept = sum(snapshot.kept_bytes for snapshot in rows.snapshots)
    text = "rows that steps keep for checkpoints being written"
    yield GaugeMetricFamily("trireme_pserver_tables_kept_bytes", text, value=kept)
    text = "that steps of rows waited for checkpoints being written"
    yield CounterMetricFamily("trireme_pserver_tables_waited_seconds", text, value=rows.kept.waited_s)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"trireme_pserver_table_{name}", text, labels=["table"])


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"trireme_pserver_table_{name}", text, labels=["table"])


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "incarnation": request.app[PSERVER].incarnation})


@routes.get("/readyz")
async def readyz(request: web.Request) -> web.Response:
    pserver = request.app[PSERVER]
    if pserver.index < 0:
        return web.json_response({"status": "waiting", "reason": "no index claimed yet"}, status=503)
    if pserver.store is None:
        reason = "loads a checkpoint" if pserver.loading else "no parameters yet"
        return web.json_response({"status": "waiting", "reason": reason}, status=503)
    return web.json_response({"status": "ready", "index": pserver.index})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(request.app[PSERVER]))
    ProcessCollector(registry=registry)
    return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")
