"""What trainers do with tasks: acquire, report progress, complete, fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.types import Receive

from master_service.api.routes.dependencies import MasterOf, answered, unless_gone
from master_service.api.routes.keyed import AnsweringInJob, empty
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    Record,
    TaskAnswer,
    TaskProgress,
)
from trireme_shared.protocol.rest import Empty

router = APIRouter(prefix="/task-leases", tags=["task leases"])
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


@router.post("", operation_id="acquireTask")
async def acquire_task(
    master: MasterOf,
    request: Request,
    ask: AcquireTask,
    idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)] = None,
) -> TaskAnswer:
    """A task, or why there is none. The same `request` (= Idempotency-Key) gets the same pending task again. With `wait_s` the
    answer comes when there is a task, at most so many seconds later."""
    if idempotency_key is not None and idempotency_key != ask.request:
        msg = f"Idempotency-Key {idempotency_key!r} and request {ask.request!r} differ; send the same id in both"
        raise InvalidArgument(msg)
    return await acquired(master, ask, request.receive)


@router.post("/{task_id}/progress", operation_id="reportTaskProgress")
async def report_task_progress(
    master: MasterOf, answering: AnsweringInJob, task_id: str, progress: TaskProgress
) -> Empty:
    """Moves the deadline of the attempt."""
    return await answering.answer(Empty, partial(master.report_progress, task_id, progress), empty)


@router.post("/{task_id}/complete", operation_id="completeTask")
async def complete_task(master: MasterOf, answering: AnsweringInJob, task_id: str, done: CompleteTask) -> Completed:
    """Takes effect exactly once, however often it is sent. With `next`: another task of the shared stream in the same transaction."""
    call = partial(master.complete_task, task_id, done)
    return await answering.answer(Completed, call, lambda completed: completed)


@router.post("/{task_id}/fail", operation_id="failTask")
async def fail_task(master: MasterOf, answering: AnsweringInJob, task_id: str, failed: FailTask) -> Empty:
    """The task goes to another trainer, or is discarded if it has failed too often."""
    return await answering.answer(Empty, partial(master.fail_task, task_id, failed), empty)
