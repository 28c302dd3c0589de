"""The job, why it does not progress, and its metrics."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response

from master_service.api import render
from master_service.api.requests.conditional import ReadingIf
from master_service.api.resources import JobView, MasterView, MetricPage, SeriesPage, SeriesPoints
from master_service.api.routes.dependencies import MasterOf, PageSize, PageToken, committed
from master_service.api.routes.keyed import AnsweringInJob
from master_service.core.explanation.cause import Explanation
from master_service.leadership.explanation import explain_job as explain_master
from shared.records import MetricBatch, MetricsTaken

of_job = APIRouter()  # below /v1/jobs/{job}
router = APIRouter()
MOST_STEP = 2**62


@of_job.get("", operation_id="getJob", tags=["jobs"], response_model=JobView)
async def get_job(master: MasterOf, reading: ReadingIf) -> Response:
    """Phase, progress, members, result and settings."""
    leader = MasterView(master_id=master.name, url=master.url, term=master.term.number)
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    view = await committed(master, lambda: render.job(master.job, master.metrics, leader, stalled))
    return reading.answer(view, view.version)


@of_job.get("/explanation", operation_id="explainJob", tags=["jobs"])
async def explain_job(master: MasterOf) -> Explanation:
    """The most important cause, and in `also` the others. Answers while the master takes over and while etcd is silent, too."""
    return await explain_master(master)


@router.get("/metrics", operation_id="listMetrics", tags=["metrics"])
async def list_metrics(
    master: MasterOf, metric: str = "step_loss", page_size: PageSize = 100, page_token: PageToken = ""
) -> MetricPage:
    """`step_loss` or `epoch_loss`. The oldest steps are forgotten."""
    master.term  # noqa: B018  a standby has none: NotLeader
    return render.metrics(master.metrics, metric, page_size, page_token)


@router.get("/metric-series", operation_id="listMetricSeries", tags=["metrics"])
async def list_metric_series(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> SeriesPage:
    """The metrics that are kept by step: `loss`, what the script logs, `lr`, `time.*`, `records_per_second`, and `evaluation.*` at the
    end.
    They outlive the master, and a job in whose place nobody leads: they lie beside its checkpoints."""
    return render.series_page(master.term.series.table, page_size, page_token)


@router.get("/metric-series/{name}", operation_id="queryMetric", tags=["metrics"])
async def query_metric(
    master: MasterOf,
    name: Annotated[str, Path(max_length=200, description="name of a metric")],
    from_step: Annotated[int, Query(ge=0, le=MOST_STEP, description="the first step")] = 0,
    to_step: Annotated[int, Query(ge=0, le=MOST_STEP, description="the last step")] = MOST_STEP,
    points: Annotated[int, Query(ge=1, le=5000, description="at most so many points")] = 500,
    by: Annotated[
        Literal["step", "epoch"], Query(description="epoch: a point for each epoch of a synchronous job")
    ] = "step",
) -> SeriesPoints:
    """A metric by step. Steps share a point where there are more of them than points. Steps that are trained again after a return to
    a checkpoint are shown once they are."""
    term = master.term
    if by == "epoch":
        return render.epoch_points(term, name, from_step, to_step, points)
    return render.series_points(term, master.metrics.step, name, from_step, to_step, points)


@router.post("/metric-batches", operation_id="reportMetrics", tags=["metrics"])
async def report_metrics(master: MasterOf, answering: AnsweringInJob, batch: MetricBatch) -> MetricsTaken:
    """What trainers report of steps: their shares, which add up, or (the owner of lane 0) whole steps, each of which counts once."""
    return await answering.answer(
        MetricsTaken, partial(master.report_metrics, batch), lambda taken: taken or MetricsTaken()
    )
