"""The states of tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BeforeValidator

from master_service.api import render
from master_service.api.resources import TaskPage, TaskView
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, committed
from shared.records import TaskKind, TaskSummary

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


@router.get("/task-summary", operation_id="getTaskSummary")
async def get_task_summary(master: MasterOf) -> TaskSummary:
    """Counts of the current stage."""
    return await committed(master, master.job.summary)
