"""Middleware of all routes: checks the bearer token, turns errors into msgpack maps."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from shared.errors import BadFrame, PeerError, TriremeError, Unauthorized
from shared.runtime import telemetry
from shared.wire import codec

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = frozenset({"/healthz", "/readyz", "/metrics"})

log = telemetry.logger("pserver.http")


def guard(token: str) -> Any:
    """Middleware; with an empty token every request passes."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token and request.path not in OPEN:
                _authorize(request, token)
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


def _authorize(request: web.Request, token: str) -> None:
    given = request.headers.get("Authorization", "")
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {token}".encode()):
        what = "a wrong token" if given else "no token"
        msg = f"{request.path} needs the job's bearer token, {what} was given; set TRIREME_TOKEN"
        raise Unauthorized(msg)


def _refusal(error: TriremeError, status: int | None = None) -> web.Response:
    return web.Response(
        body=codec.encode(error.to_map()), status=status or error.status, content_type=codec.CONTENT_TYPE
    )
