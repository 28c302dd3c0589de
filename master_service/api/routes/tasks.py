"""The states of tasks, and what users ask for about one."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator

from master_service.api import render
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, asked_by, committed
from master_service.api.routes.keyed import AnsweringInJob
from trireme_shared.protocol.records import TaskKind, TaskSummary
from trireme_shared.protocol.rest import TaskPage, TaskView

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
    """A DISCARDED task of the current epoch is given out again, with all its attempts before it. Minibatches that were applied are not
    applied twice. A synchronous job cannot: its lanes have gone on."""
    call = partial(master.retry_task, task_id, asked_by(request))
    return await answering.answer(TaskView, call, partial(render.asked_task, master.job))


@router.post("/tasks/{task_id}/skip", operation_id="skipTask")
async def skip_task(master: MasterOf, answering: AnsweringInJob, request: Request, task_id: str) -> TaskView:
    """A PENDING or REQUEUED task is DISCARDED without more attempts; who works on it is told that its attempt is stale. The task of a
    synchronous job stays as it is until its present attempt has failed. Refused if the job would fail for it
    (max_discarded_fraction)."""
    call = partial(master.skip_task, task_id, asked_by(request))
    return await answering.answer(TaskView, call, partial(render.asked_task, master.job))


@router.get("/task-summary", operation_id="getTaskSummary")
async def get_task_summary(master: MasterOf) -> TaskSummary:
    """Counts of the current stage."""
    return await committed(master, master.job.summary)
