"""Tasks: their states, what users ask for about one, and what trainers do with them (leases): acquire, report
progress, complete, fail.

The requests of trainers for every task are served in front of FastAPI: same URLs and answers, 0.4 ms faster
each.

    POST /v1/jobs/{job}/task-leases..., JSON, a valid body
        ──► DirectTaskLeases: the Master's method ──► its record as JSON, or its problem
    anything else
        ──► FastAPI, with the body as it came: it documents these routes and refuses all that is not valid

Nothing is accepted in front that FastAPI would refuse. What a request does is said once: in `acquired`, and
in REPORTS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BeforeValidator, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from master_service.api import render
from master_service.api.middleware import MAX_BODY_BYTES, read_body, replayed
from master_service.api.problems import CONTENT_TYPE, problem_of, problem_of_bug, request_id_of, retry_after_s
from master_service.api.routes.dependencies import (
    AnsweringInJob,
    MasterOf,
    PageSize,
    PageToken,
    answered,
    asked_by,
    committed,
    empty,
    unless_gone,
)
from master_service.cluster.leader import JobsLed
from master_service.leadership.master import Master
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import InvalidArgument, TriremeError
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    Record,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    TaskSummary,
)
from trireme_shared.protocol.rest import Empty, Problem, TaskPage, TaskView

router = APIRouter(tags=["tasks"])

TaskState = Literal["TODO", "PENDING", "REQUEUED", "DONE", "DISCARDED"]


def _upper(state: object) -> object:
    """Lower case is accepted: `discarded` means `DISCARDED`."""
    return state.upper() if isinstance(state, str) else state


@router.get("/tasks", operation_id="listTasks")
async def list_tasks(
    master: MasterOf,
    state: Annotated[TaskState | None, Query(), BeforeValidator(_upper)] = None,
    kind: TaskKind = TaskKind.TRAIN,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> TaskPage:
    """Tasks of the current epoch (DISCARDED: of all). A page may be short and still have a next one."""
    return await committed(master, lambda: render.tasks(master.job, kind, state, page_size, page_token))


@router.get("/tasks/{task_id}", operation_id="getTask")
async def get_task(master: MasterOf, task_id: str) -> TaskView:
    """One task of the current epoch, or a discarded one."""
    return await committed(master, lambda: render.task(master.job, task_id))


@router.post("/tasks/{task_id}/retry", operation_id="retryTask")
async def retry_task(master: MasterOf, answering: AnsweringInJob, request: Request, task_id: str) -> TaskView:
    """A DISCARDED task of the current epoch is given out again, with all its attempts before it. Minibatches
    that were applied are not applied twice. A synchronous job cannot: its lanes have gone on."""
    call = partial(master.retry_task, task_id, asked_by(request))
    return await answering.answer(TaskView, call, partial(render.asked_task, master.job))


@router.post("/tasks/{task_id}/skip", operation_id="skipTask")
async def skip_task(master: MasterOf, answering: AnsweringInJob, request: Request, task_id: str) -> TaskView:
    """A PENDING or REQUEUED task is DISCARDED without more attempts; who works on it is told that its attempt
    is stale. The task of a synchronous job stays as it is until its present attempt has failed. Refused if
    the job would fail for it (max_discarded_fraction)."""
    call = partial(master.skip_task, task_id, asked_by(request))
    return await answering.answer(TaskView, call, partial(render.asked_task, master.job))


@router.get("/task-summary", operation_id="getTaskSummary")
async def get_task_summary(master: MasterOf) -> TaskSummary:
    """Counts of the current stage."""
    return await committed(master, master.job.summary)


leases = APIRouter(prefix="/task-leases", tags=["task leases"])
Reporting = Callable[[Master, str, Any], Awaitable[Record | None]]
#: the body of each report and the method that takes it, by the end of the report's path
REPORTS: dict[str, tuple[type[Record], Reporting]] = {
    "progress": (TaskProgress, Master.report_progress),
    "complete": (CompleteTask, Master.complete_task),
    "fail": (FailTask, Master.fail_task),
}


def acquired(master: Master, ask: AcquireTask, receive: Receive) -> Awaitable[TaskAnswer]:
    """The answer to a trainer that asks for a task, unless it closes the connection while it waits."""
    call = answered(master.acquire_task(ask), ask.wait_s)
    return unless_gone(call, receive) if ask.wait_s else call


@leases.post("", operation_id="acquireTask")
async def acquire_task(
    master: MasterOf,
    request: Request,
    ask: AcquireTask,
    idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)] = None,
) -> TaskAnswer:
    """A task, or why there is none. The same `request` (= Idempotency-Key) gets the same pending task again.
    With `wait_s` the answer comes when there is a task, at most so many seconds later."""
    if idempotency_key is not None and idempotency_key != ask.request:
        msg = (
            f"Idempotency-Key {idempotency_key!r} and request {ask.request!r} differ; send the same id "
            "in both"
        )
        raise InvalidArgument(msg)
    return await acquired(master, ask, request.receive)


@leases.post("/{task_id}/progress", operation_id="reportTaskProgress")
async def report_task_progress(
    master: MasterOf, answering: AnsweringInJob, task_id: str, progress: TaskProgress
) -> Empty:
    """Moves the deadline of the attempt."""
    return await answering.answer(Empty, partial(master.report_progress, task_id, progress), empty)


@leases.post("/{task_id}/complete", operation_id="completeTask")
async def complete_task(
    master: MasterOf, answering: AnsweringInJob, task_id: str, done: CompleteTask
) -> Completed:
    """Takes effect exactly once, however often it is sent. With `next`: another task of the shared stream in
    the same transaction."""
    call = partial(master.complete_task, task_id, done)
    return await answering.answer(Completed, call, lambda completed: completed)


@leases.post("/{task_id}/fail", operation_id="failTask")
async def fail_task(master: MasterOf, answering: AnsweringInJob, task_id: str, failed: FailTask) -> Empty:
    """The task goes to another trainer, or is discarded if it has failed too often."""
    return await answering.answer(Empty, partial(master.fail_task, task_id, failed), empty)


LEASES = "task-leases"

log = telemetry.logger("rest")


class _Unusual(Exception):
    """FastAPI shall handle this request."""


Served = Callable[[bytes, Receive], Awaitable[Record | None]]


class DirectTaskLeases:
    """ASGI, around `app`, which is FastAPI with all routes. Who may ask is checked before (Guarded)."""

    def __init__(self, app: ASGIApp, jobs: JobsLed) -> None:
        self._app, self._jobs = app, jobs

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
        request_id = scope.get("request_id") or request_id_of(headers)
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
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return None
        if not parts:
            return partial(self._acquire, job, headers.get(b"idempotency-key"))
        if b"idempotency-key" in headers:
            return None
        if len(parts) != 2 or not parts[0] or parts[1] not in REPORTS:
            return None
        return partial(self._report, job, parts[0], *REPORTS[parts[1]])

    # ------------------------------------------------- each raises before it awaits what FastAPI shall answer

    def _acquire(
        self, job: str | None, idempotency_key: bytes | None, body: bytes, receive: Receive
    ) -> Awaitable[Record | None]:
        ask = AcquireTask.model_validate_json(body)
        if idempotency_key is not None and (
            len(ask.request) > 200 or idempotency_key != ask.request.encode("utf-8")
        ):
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
