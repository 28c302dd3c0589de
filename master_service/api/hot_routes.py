"""The requests of trainers for every task, served in front of FastAPI: same URLs and answers, 0.4 ms faster each.

    POST /v1/jobs/{job}/task-leases..., JSON, a valid body ──► the Master's method ──► its record as JSON, or its problem
    anything else ──► FastAPI, with the body as it came: it documents these routes and refuses every request that is not valid

What a request does is said once, in routes/task_leases.py: here only the way to it is shorter.

Nothing is accepted here that FastAPI would refuse, and the answers are the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from master_service.api.limits import read_body, replayed
from master_service.api.problems import CONTENT_TYPE, problem_of, problem_of_bug, request_id_of, retry_after_s
from master_service.api.resources import Empty, Problem
from master_service.api.routes.dependencies import answered
from master_service.api.routes.task_leases import REPORTS, Reporting, acquired
from master_service.cluster.leader import JobsLed
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import AcquireTask, Record

LEASES = "task-leases"

log = telemetry.logger("rest")


class _Unusual(Exception):
    """FastAPI shall handle this request."""


Served = Callable[[bytes, Receive], Awaitable[Record | None]]


class DirectTaskLeases:
    """ASGI, around `app`, which is FastAPI with all routes. Who may ask is checked before (auth.py)."""

    def __init__(self, app: ASGIApp, jobs: JobsLed, *, max_body_bytes: int) -> None:
        self._app, self._jobs, self._max_body_bytes = app, jobs, max_body_bytes

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
        except (ValidationError, _Unusual, TriremeError):
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
        if isinstance(answer, Problem) and answer.retryable:
            head.append((b"retry-after", b"%d" % retry_after_s(answer)))
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})

    def _route(self, scope: Scope, headers: dict[bytes, bytes]) -> Served | None:
        """What serves the request; None: FastAPI."""
        if scope["method"] != "POST" or scope["query_string"] or (found := _parts(scope["path"])) is None:
            return None
        job, parts = found
        if len(headers) != len(scope["headers"]) or headers.get(b"content-type") != b"application/json":
            return None
        if b"if-match" in headers:  # refused
            return None
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return None
        if not parts:
            return partial(self._acquire, job, headers.get(b"idempotency-key"))
        if b"idempotency-key" in headers:
            return None
        if len(parts) != 2 or not parts[0] or parts[1] not in REPORTS:
            return None
        return partial(self._report, job, parts[0], *REPORTS[parts[1]])

    # ------------------------------------------------------------ each raises before it awaits what FastAPI shall answer

    def _acquire(
        self, job: str | None, idempotency_key: bytes | None, body: bytes, receive: Receive
    ) -> Awaitable[Record | None]:
        ask = AcquireTask.model_validate_json(body)
        if idempotency_key is not None and (len(ask.request) > 200 or idempotency_key != ask.request.encode("utf-8")):
            raise _Unusual
        return acquired(self._jobs.find(job), ask, receive)

    def _report(
        self,
        job: str | None,
        task_id: str,
        kind: type[Record],
        report: Reporting,
        body: bytes,
        _: Receive,
    ) -> Awaitable[Record | None]:
        record = kind.model_validate_json(body)
        return answered(report(self._jobs.find(job), task_id, record))


def _parts(path: str) -> tuple[str | None, list[str]] | None:
    """The job (None: the only one) and what follows `task-leases` in the path. None: it is another path."""
    job: str | None = None
    _, version, *parts = path.split("/")
    if parts[:1] == ["jobs"] and len(parts) > 1:
        job, parts = parts[1], parts[2:]
    return (job, parts[1:]) if version == "v1" and parts[:1] == [LEASES] else None
