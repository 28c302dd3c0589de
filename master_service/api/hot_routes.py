"""The requests of trainers for every task, served in front of FastAPI: same URLs and answers, 0.4 ms faster each.

    POST /v1/task-leases..., JSON, the token, a valid body ──► the Master's method ──► its record as JSON, or its problem
    anything else ──► FastAPI, with the body as it came: it documents these routes (routes/task_leases.py) and refuses
                      every request that is not valid

Nothing is accepted here that FastAPI would refuse, and the answers are the same.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from master_service.api.limits import read_body, replayed
from master_service.api.problems import CONTENT_TYPE, problem_of, problem_of_bug, request_id_of
from master_service.api.resources import Empty, Problem
from master_service.api.routes.dependencies import answered, unless_gone
from master_service.leadership.master import Master
from shared.errors import TriremeError
from shared.records import AcquireTask, CompleteTask, FailTask, Record, TaskProgress
from shared.runtime import telemetry

PREFIX = "/v1/task-leases"

log = telemetry.logger("rest")


class _Unusual(Exception):
    """FastAPI shall handle this request."""


Served = Callable[[bytes, Receive], Awaitable[Record | None]]
Reporting = Callable[[str, Any], Awaitable[Record | None]]


class DirectTaskLeases:
    """ASGI, around `app`, which is FastAPI with all routes."""

    def __init__(self, app: ASGIApp, master: Master, token: str, *, max_body_bytes: int) -> None:
        self._app, self._master, self._max_body_bytes = app, master, max_body_bytes
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._reports: dict[str, tuple[type[Record], Reporting]] = {
            "progress": (TaskProgress, master.report_progress),
            "complete": (CompleteTask, master.complete_task),
            "fail": (FailTask, master.fail_task),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        serve = self._route(scope, headers) if headers else None
        if serve is None:
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        try:
            call = serve(body, receive)
        except (ValidationError, _Unusual):
            await self._app(scope, replayed(body, receive), send)
            return
        request_id = request_id_of(headers)
        try:
            report = await call
            answer: Record = report or Empty()
        except TriremeError as error:
            answer = problem_of(error, request_id)
        except Exception:  # a bug: the master goes on, the caller gets a problem
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            answer = problem_of_bug(request_id)
        status, content_type = 200, "application/json"
        if isinstance(answer, Problem):
            status, content_type = answer.status, CONTENT_TYPE
        content = answer.__pydantic_serializer__.to_json(answer)
        head = [(b"content-length", b"%d" % len(content)), (b"content-type", content_type.encode())]
        head.append((b"x-request-id", request_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})

    def _route(self, scope: Scope, headers: dict[bytes, bytes]) -> Served | None:
        """What serves the request; None: FastAPI."""
        path: str = scope["path"]
        if not path.startswith(PREFIX) or scope["method"] != "POST":
            return None
        if len(headers) != len(scope["headers"]) or headers.get(b"content-type") != b"application/json":
            return None
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return None
        if self._authorization and not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            return None
        if path == PREFIX:
            return partial(self._acquire, headers.get(b"idempotency-key"))
        empty, task_id, action = f"{path[len(PREFIX) :]}//".split("/")[:3]
        if empty or not task_id or path != f"{PREFIX}/{task_id}/{action}":
            return None
        return partial(self._report, task_id, *self._reports[action]) if action in self._reports else None

    # ------------------------------------------------------------ each raises ValidationError or _Unusual before it awaits

    def _acquire(self, idempotency_key: bytes | None, body: bytes, receive: Receive) -> Awaitable[Record | None]:
        ask = AcquireTask.model_validate_json(body)
        if idempotency_key is not None and (len(ask.request) > 200 or idempotency_key != ask.request.encode("utf-8")):
            raise _Unusual
        call = answered(self._master.acquire_task(ask), ask.wait_s)
        return unless_gone(call, receive) if ask.wait_s else call

    def _report(
        self, task_id: str, kind: type[Record], report: Reporting, body: bytes, _: Receive
    ) -> Awaitable[Record | None]:
        return answered(report(task_id, kind.model_validate_json(body)))
