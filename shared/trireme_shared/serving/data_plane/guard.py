"""Middleware of all routes: checks the token's role, the host and the origin of a request, turns errors into msgpack maps.

/healthz, /readyz ─► nobody is asked      /metrics ─► viewer      everything else, streams too ─► member

Members say which process they mean, by its incarnation: it is random, and they have it from the keys of their own job in their own
cluster. So nobody's frames reach a process of another job, or one that has got the port of a dead one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.http import MEANT
from trireme_shared.platform.security.access import CHALLENGE, Access, Asked
from trireme_shared.platform.security.listening import Arrivals
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import AnotherProcess, BadFrame, PeerError, TriremeError, Unauthorized
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.transport.stream import PATH

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = frozenset({"/healthz", "/readyz"})
READ_BY_VIEWERS = frozenset({"/metrics"})

log = telemetry.logger("pserver.http")


def guard(access: Access, incarnation: str, arrivals: Arrivals) -> Any:
    """Middleware of an application of the pserver `incarnation`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in OPEN:
                access.admit(asked_of(request), Role.VIEWER if request.path in READ_BY_VIEWERS else Role.MEMBER)
                _check_meant(request, incarnation)
                arrivals.admit(request.transport)
            return await handler(request)
        except TriremeError as error:
            return _refusal(error)
        except web.HTTPException as error:
            return _refusal(BadFrame(f"{request.method} {request.path}: {error.reason}"), error.status)
        except (ConnectionError, TimeoutError) as error:
            return _refusal(PeerError(f"{request.method} {request.path} broke off: {type(error).__name__}: {error}"))
        except Exception as error:
            log.exception("request_failed", path=request.path)
            return _refusal(TriremeError(f"{type(error).__name__}: {error}; see the log of this pserver"))

    return middleware


def _check_meant(request: web.Request, incarnation: str) -> None:
    meant = request.headers.get(MEANT)
    if meant is None and request.path == PATH:
        raise BadFrame(f"{PATH} needs the header {MEANT}: the incarnation of the parameter server that is meant")
    if meant not in (None, incarnation):
        msg = f"this is the parameter server {incarnation}, not {str(meant)[:200]}; read its address again"
        raise AnotherProcess(msg)


def asked_of(request: web.Request) -> Asked:
    """Take it while the connection is open: it has the address."""
    return Asked.of(request.method, request.headers, request.get_extra_info("sockname"))


def _refusal(error: TriremeError, status: int | None = None) -> web.Response:
    headers = {"WWW-Authenticate": CHALLENGE} if isinstance(error, Unauthorized) else None
    return web.Response(
        body=codec.encode(error.to_map()),
        status=status or error.status,
        headers=headers,
        content_type=codec.CONTENT_TYPE,
    )
