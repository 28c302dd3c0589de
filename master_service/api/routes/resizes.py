"""Resizes of the running job: other numbers of trainers and parameter servers.

POST asks (202, an operation). One runs at a time. What one would move is told without it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from master_service.api import render
from master_service.api.resources import CreateResize, ResizePage, ResizeView
from master_service.api.routes.asking import Asking
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, WaitS, committed
from master_service.api.routes.keyed import AnsweringInJob
from trireme_shared.protocol.records.job_choices import MAX_MEMBERS
from trireme_shared.protocol.records.operations import ResizePrediction, Strategy

router = APIRouter(tags=["resizes"])

Trainers = Annotated[int | None, Query(le=MAX_MEMBERS, description="left out: as many as now")]
Pservers = Annotated[int | None, Query(le=MAX_MEMBERS, description="left out: as many as now")]


@router.post("/resizes", operation_id="createResize", status_code=202)
async def create_resize(master: MasterOf, asking: Asking, asked: CreateResize) -> ResizeView:
    """Change the numbers of members while the job trains. What is left out stays as it is."""
    operations = master.term.operations
    numbers = asked.trainers, asked.pservers, asked.strategy
    key, cause = asking.key, asked.cause or asking.by
    return render.resize(
        await asking.begin(lambda once: operations.create_resize(key, cause, *numbers, asked.limit_s, once), "resizes")
    )


@router.get("/resizes", operation_id="listResizes")
async def list_resizes(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> ResizePage:
    """Those that run and the last ones that ended, newest first."""
    return await committed(master, lambda: render.resizes(master.job, page_size, page_token))


@router.get("/resizes/{resize_id}", operation_id="getResize")
async def get_resize(master: MasterOf, resize_id: str, wait_s: WaitS = 0.0) -> ResizeView:
    """Answers at once, or when it has ended, at most `wait_s` later."""
    operations = master.term.operations
    await operations.wait(resize_id, wait_s)
    return await committed(master, lambda: render.resize(operations.get(resize_id)))


@router.post("/resizes/{resize_id}/cancel", operation_id="cancelResize")
async def cancel_resize(master: MasterOf, answering: AnsweringInJob, resize_id: str) -> ResizeView:
    """Groups of slots that have moved stay where they are; no others move. The job wants as many members as that needs."""
    call = partial(master.term.operations.cancel_resize, resize_id)
    return await answering.answer(ResizeView, call, render.resize)


@router.get("/resize-prediction", operation_id="predictResize")
async def predict_resize(
    master: MasterOf,
    trainers: Trainers = None,
    pservers: Pservers = None,
    strategy: Strategy = Strategy.LIVE,
) -> ResizePrediction:
    """What a resize to these numbers would move, from the layout alone. Nothing changes."""
    operations = master.term.operations
    return await committed(master, lambda: operations.predict_resize(trainers, pservers, strategy))
