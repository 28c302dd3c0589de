"""The REST API of a `Master`: request id, limit of the body, token, routes, problems.

request -> bounded (ASGI) -> token -> route: decode -> master -> encode        every error -> problem+json
    └─ requests for every task: hot_routes.py, without FastAPI
"""

from __future__ import annotations

import hmac
import re
from importlib.metadata import version

from fastapi import Depends, FastAPI, Request
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from master_service.api import problems
from master_service.api.hot_routes import DirectTaskLeases
from master_service.api.routes import (
    checkpoints,
    job,
    members,
    operations,
    system,
    task_leases,
    tasks,
)
from master_service.leadership.master import Master
from shared.errors import TooLarge, Unauthorized
from shared.runtime import telemetry

MAX_BODY_BYTES = 1 << 20
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

log = telemetry.logger("rest")

DESCRIPTION = "Control plane of one Trireme job: tasks, members, progress. Errors are RFC 9457 problem details."


def make_app(master: Master, *, token: str = "") -> ASGIApp:
    """The application. `token` empty: no authentication (for 127.0.0.1 only)."""
    return DirectTaskLeases(make_api(master, token=token), master, token, max_body_bytes=MAX_BODY_BYTES)


def make_api(master: Master, *, token: str = "") -> FastAPI:
    """All routes in FastAPI, with their documentation."""

    async def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            what = "another bearer token than the job's" if given else "no bearer token"
            raise Unauthorized(f"the request has {what}", hint="give the job's token in TRIREME_TOKEN")

    app = FastAPI(
        title="Trireme master",
        version=version("trireme"),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.state.master = master
    for routes in (job, tasks, task_leases, members, checkpoints, operations, system):
        app.include_router(routes.router, dependencies=[Depends(authorised)])
    app.include_router(system.open_router)
    problems.install(app)
    app.add_middleware(Bounded)
    return app


class Bounded:
    """Around all routes: an id for every request (or the caller's own), bodies up to MAX_BODY_BYTES, text that can be
    encoded again, bugs as problems."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = scope["request_id"] = problems.request_id_of(headers)
        seen, started = bytearray(), False

        async def bounded_receive() -> Message:
            message = await receive()
            seen.extend(message.get("body", b""))
            if len(seen) > MAX_BODY_BYTES:  # sent without a length: the connection is closed
                return {"type": "http.disconnect"}
            if message["type"] == "http.request" and not message.get("more_body"):
                _check_text(seen)
            return message

        async def named_send(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            response = problems.problem_response(problems.problem_of(_too_large(int(announced)), request_id))
            await response(scope, receive, named_send)
            return
        try:
            await self._app(scope, bounded_receive, named_send)
        except Exception:  # a bug: the master goes on, the caller gets a problem
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            if started:
                raise
            response = problems.problem_response(problems.problem_of_bug(request_id))
            await response(scope, receive, named_send)


def _check_text(body: bytearray) -> None:
    """Raises HTTPException for a lone surrogate: Python's JSON takes it, but it cannot be encoded again, for etcd say."""
    if SURROGATE.search(body):
        try:
            from_json(body)
        except ValueError as error:
            msg = f"the body is no JSON, or half a surrogate pair (\\ud800 to \\udfff) stands in its text: {error}; send valid Unicode"
            raise HTTPException(422, msg) from error


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more, at most {MAX_BODY_BYTES} are taken; send it in parts")
