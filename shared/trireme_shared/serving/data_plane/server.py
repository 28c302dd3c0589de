"""The HTTP server of one server of blocks, on TCP and, if configured, a UNIX socket: the routes of its data
plane (http.py), health and metrics, and the middleware that says who may ask.

/healthz (the process serves), /readyz (it has parameters) ─► nobody is asked
/metrics (Prometheus text) ─► viewer      everything else, streams too ─► member

Members say which process they mean, by its incarnation: it is random, and they have it from the keys of their
own job in their own cluster. So nobody's frames reach a process of another job, or one that has got the port
of a dead one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.http import MEANT, hide_implementation
from trireme_shared.platform.security.access import CHALLENGE, Access
from trireme_shared.platform.security.listening import Arrivals, listening
from trireme_shared.platform.security.private_files import LOOK_S, SOCKET_PATH_BYTES
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import (
    AnotherProcess,
    BadFrame,
    CallerError,
    PeerError,
    TriremeError,
    Unauthorized,
)
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.data_plane import http, stream
from trireme_shared.serving.transport.stream import PATH

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba
    from trireme_shared.tables.table import Table


READ_BUFFER_BYTES = 1 << 20
ARRIVALS = web.AppKey("arrivals", Arrivals)
KEEP_ALIVE_S = 3600.0  # trainers keep their connection while they compute
SHUTDOWN_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = frozenset({"/healthz", "/readyz"})
READ_BY_VIEWERS = frozenset({"/metrics"})
COUNTERS = {  # field of Counters -> (name, help); base units at the end, prometheus_client adds _total
    "pushes": ("pushes", "pushes that began"),
    "pulls": ("pulls", "pulls that began"),
    "blocks_applied": ("applied_blocks", "pushed blocks that were applied"),
    "blocks_duplicate": ("duplicate_blocks", "pushed blocks that had been applied before"),
    "blocks_refused": ("refused_blocks", "pushed blocks that were refused"),
    "bytes_pushed": ("pushed_bytes", "payloads of pushed blocks"),
    "bytes_pulled": ("pulled_bytes", "payloads of pulled blocks"),
}

routes = web.RouteTableDef()
log = telemetry.logger("pserver.http")


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
    app[stream.PSERVER], app[stream.ACCESS] = pserver, access
    app[stream.TIME_LIMITS], app[stream.STREAMS] = stream.TimeLimits(stall_s, idle_s), stream.Streams()
    app.on_response_prepare.append(hide_implementation)
    app.on_shutdown.append(stream.close_streams)
    app.add_routes(http.routes)
    app.router.add_get(PATH, stream.take_upgrade)
    app.add_routes(routes)
    return app


@asynccontextmanager
async def serving(
    app: web.Application,
    host: str,
    port: int,
    uds: str = "",
    tls: ssl.SSLContext | None = None,
    *,
    lenient: bool = False,
) -> AsyncIterator[Listening]:
    """Serve until the `with` block ends; the socket `uds` accepts our own user only, without `tls`.
    `lenient`: peers come by the address while that socket cannot be made. Raises CallerError if the port is
    taken."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # so nothing is done for a peer that is gone
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,  # a few KiB could become a GiB; bodies come as they are
    )
    async with listening(runner, app[ARRIVALS], host, port, tls) as bound:
        if not uds:
            yield Listening(port=bound)
            return
        door = UnixDoor(runner, uds)
        await door.open(lenient=lenient)
        keeping = asyncio.ensure_future(door.keep())
        try:
            yield Listening(port=bound, uds=uds)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            Path(uds).unlink(missing_ok=True)  # noqa: ASYNC240


def socket_path(uds: str, incarnation: str) -> str:
    """The socket that TRIREME_UDS asks for. In a folder each incarnation has a name of its own, so a trainer
    never reaches a successor of the process it means."""
    if not (is_lasting(uds) or (uds and Path(uds).is_dir())):
        return uds
    named = str(Path(uds) / f"{incarnation}.sock")
    if len(os.fsencode(named)) <= SOCKET_PATH_BYTES:
        return named
    return str(Path(uds) / f"{hashlib.sha256(incarnation.encode()).hexdigest()[:16]}.sock")


def is_lasting(uds: str) -> bool:
    """Whether it names a folder that whoever gave it makes again when it is deleted: it ends with a slash.
    Nobody has chosen the sockets in it, so none of them is a condition of anything."""
    return uds.endswith("/")


class UnixDoor:
    """The UNIX socket of a server. It is made again if somebody deletes it, as programs do that clean
    temporary folders; meanwhile peers come by the address."""

    def __init__(self, runner: web.AppRunner, path: str) -> None:
        self._runner, self._path = runner, Path(path)
        self._site: web.SockSite | None = None
        self._made: os.stat_result | None = None  # the socket that is served
        self._cause = ""  # why it could not be made

    def __repr__(self) -> str:
        return f"<UnixDoor {self._path}: {self._cause or 'open'}>"

    async def open(self, *, lenient: bool) -> None:
        """Raises CallerError if the socket cannot be made, unless `lenient`."""
        try:
            await self._serve()
        except CallerError as error:
            if not lenient:
                raise
            self._tell(error.message)

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._is_there():
                continue
            try:
                await self._serve()
            except CallerError as error:
                self._tell(error.message)
            else:
                log.warning("unix_socket_made_again", path=str(self._path))

    async def _serve(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None
        listener = _bind_path(str(self._path))
        self._made, self._cause = self._path.lstat(), ""
        self._site = web.SockSite(self._runner, listener)
        await self._site.start()

    def _is_there(self) -> bool:
        try:
            return self._made is not None and os.path.samestat(self._path.lstat(), self._made)
        except OSError:
            return False

    def _tell(self, cause: str) -> None:
        if cause != self._cause:
            self._cause = cause
            log.warning("unix_socket_missing", cause=cause, instead="peers come by the address")


def _bind_path(uds: str) -> socket.socket:
    if len(os.fsencode(uds)) > SOCKET_PATH_BYTES:
        msg = (
            f"the UNIX socket {uds} has a path of {len(os.fsencode(uds))} bytes, at most "
            f"{SOCKET_PATH_BYTES} are possible; choose a shorter TRIREME_UDS"
        )
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


# ---------------------------------------------------------------- who may ask


def guard(access: Access, incarnation: str, arrivals: Arrivals) -> Any:
    """Middleware of all routes of the pserver `incarnation`: checks the token's role, the host and the origin
    of a request, turns errors into msgpack maps."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in OPEN:
                access.admit(
                    stream.asked_of(request), Role.VIEWER if request.path in READ_BY_VIEWERS else Role.MEMBER
                )
                _check_meant(request, incarnation)
                arrivals.admit(request.transport)
            return await handler(request)
        except TriremeError as error:
            return _refusal(error)
        except web.HTTPException as error:
            return _refusal(BadFrame(f"{request.method} {request.path}: {error.reason}"), error.status)
        except (ConnectionError, TimeoutError) as error:
            return _refusal(
                PeerError(f"{request.method} {request.path} broke off: {type(error).__name__}: {error}")
            )
        except Exception as error:
            log.exception("request_failed", path=request.path)
            return _refusal(TriremeError(f"{type(error).__name__}: {error}; see the log of this pserver"))

    return middleware


def _check_meant(request: web.Request, incarnation: str) -> None:
    meant = request.headers.get(MEANT)
    if meant is None and request.path == PATH:
        raise BadFrame(
            f"{PATH} needs the header {MEANT}: the incarnation of the parameter server that is meant"
        )
    if meant not in (None, incarnation):
        msg = f"this is the parameter server {incarnation}, not {str(meant)[:200]}; read its address again"
        raise AnotherProcess(msg)


def _refusal(error: TriremeError, status: int | None = None) -> web.Response:
    headers = {"WWW-Authenticate": CHALLENGE} if isinstance(error, Unauthorized) else None
    return web.Response(
        body=codec.encode(error.to_map()),
        status=status or error.status,
        headers=headers,
        content_type=codec.CONTENT_TYPE,
    )


# ---------------------------------------------------------------- health and metrics


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "incarnation": request.app[stream.PSERVER].incarnation})


@routes.get("/readyz")
async def readyz(request: web.Request) -> web.Response:
    pserver = request.app[stream.PSERVER]
    if pserver.index < 0:
        return web.json_response({"status": "waiting", "reason": "no index claimed yet"}, status=503)
    if pserver.store is None:
        reason = "loads a checkpoint" if pserver.loading else "no parameters yet"
        return web.json_response({"status": "waiting", "reason": reason}, status=503)
    return web.json_response({"status": "ready", "index": pserver.index})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(request.app[stream.PSERVER]))
    ProcessCollector(registry=registry)
    return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")


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
        (
            _counter("refused_gradients", "gradients of ids that had no row yet"),
            lambda table: table.counts.refused,
        ),
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
