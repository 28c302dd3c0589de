"""Resizes of the running job: other numbers of trainers and parameter servers.

POST asks (202, an operation), or predicts (`dry_run`: 200, nothing changes). One runs at a time.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from master_service.api import render
from master_service.api.resources import CreateResize, ResizePage, ResizeView
from master_service.api.routes.asking import Asking
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, WaitS, committed
from master_service.api.routes.keyed import AnsweringInJob
from shared.records.operations import ResizePrediction

router = APIRouter(prefix="/resizes", tags=["resizes"])


@router.post("", operation_id="createResize", status_code=202, responses={200: {"model": ResizePrediction}})
async def create_resize(master: MasterOf, asking: Asking, asked: CreateResize) -> ResizeView | ResizePrediction:
    """Change the numbers of members while the job trains. What is left out stays as it is."""
    operations = master.term.operations
    numbers = asked.trainers, asked.pservers, asked.strategy
    if asked.dry_run:
        asking.response.status_code = 200
        return await committed(master, lambda: operations.predict_resize(*numbers))
    key, cause = asking.key, asked.cause or asking.by
    return render.resize(
        await asking.begin(lambda once: operations.create_resize(key, cause, *numbers, asked.limit_s, once), "resizes")
    )


@router.get("", operation_id="listResizes")
async def list_resizes(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> ResizePage:
    """Those that run and the last ones that ended, newest first."""
    return await committed(master, lambda: render.resizes(master.job, page_size, page_token))


@router.get("/{resize_id}", operation_id="getResize")
async def get_resize(master: MasterOf, resize_id: str, wait_s: WaitS = 0.0) -> ResizeView:
    """Answers at once, or when it has ended, at most `wait_s` later."""
    operations = master.term.operations
    await operations.wait(resize_id, wait_s)
    return await committed(master, lambda: render.resize(operations.get(resize_id)))


@router.post("/{resize_id}/cancel", operation_id="cancelResize")
async def cancel_resize(master: MasterOf, answering: AnsweringInJob, resize_id: str) -> ResizeView:
    """Groups of slots that have moved stay where they are; no others move. The job wants as many members as that needs."""
    call = partial(master.term.operations.cancel_resize, resize_id)
    return await answering.answer(ResizeView, call, render.resize)
