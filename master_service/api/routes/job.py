"""The job, and why it does not progress."""

from __future__ import annotations

from fastapi import APIRouter, Response

from master_service.api import render
from master_service.api.requests.conditional import ReadingIf
from master_service.api.routes.dependencies import MasterOf, committed
from master_service.leadership.explanation import explain_job as explain_master
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.rest import JobView, MasterView

router = APIRouter()  # below /v1/jobs/{job}


@router.get("", operation_id="getJob", tags=["jobs"], response_model=JobView)
async def get_job(master: MasterOf, reading: ReadingIf) -> Response:
    """Phase, progress, members, result and settings."""
    leader = MasterView(master_id=master.name, url=master.url, term=master.term.number)
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    view = await committed(master, lambda: render.job(master.job, master.metrics, leader, stalled))
    return reading.answer(view, view.version)


@router.get("/explanation", operation_id="explainJob", tags=["jobs"])
async def explain_job(master: MasterOf) -> Explanation:
    """The most important cause, and in `also` the others. Answers while the master takes over and while etcd is silent, too."""
    return await explain_master(master)
