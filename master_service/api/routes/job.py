"""The job, why it does not progress, and its metrics."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter

from master_service.api import render
from master_service.api.resources import Empty, JobView, MasterView, MetricPage
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, committed
from master_service.api.routes.keyed import AnsweringInJob, empty
from master_service.core.explanation.cause import Explanation
from master_service.leadership.explanation import explain_job
from shared.records import MetricBatch

of_job = APIRouter()  # below /v1/jobs/{job}
router = APIRouter()


@of_job.get("", operation_id="getJob", tags=["job"])
async def get_job(master: MasterOf) -> JobView:
    leader = MasterView(master_id=master.name, url=master.url, term=master.term.number)
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    return await committed(master, lambda: render.job(master.job, master.metrics, leader, stalled))


@of_job.get("/explanation", operation_id="explainJob", tags=["job"])
async def explain(master: MasterOf) -> Explanation:
    """The most important cause, and in `also` the others. Answers while the master takes over and while etcd is silent, too."""
    return await explain_job(master)


@router.get("/metrics", operation_id="listMetrics", tags=["metrics"])
async def list_metrics(
    master: MasterOf, metric: str = "step_loss", page_size: PageSize = 100, page_token: PageToken = ""
) -> MetricPage:
    """`step_loss` or `epoch_loss`. The oldest steps are forgotten."""
    master.term  # noqa: B018  a standby has none: NotLeader
    return render.metrics(master.metrics, metric, page_size, page_token)


@router.post("/metric-batches", operation_id="reportMetrics", tags=["metrics"])
async def report_metrics(master: MasterOf, answering: AnsweringInJob, batch: MetricBatch) -> Empty:
    return await answering.answer(Empty, partial(master.report_metrics, batch), empty)
