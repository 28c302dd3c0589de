"""What a job has found out: its metrics by step and by epoch, and its evaluations. They stay when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request

from master_service.api.metrics import render
from master_service.api.metrics.render import KeptMetrics
from master_service.api.resources import EvaluationPage, MetricPage, SeriesPage, SeriesPoints
from master_service.api.routes.dependencies import JobsOf, MasterOf, PageSize, PageToken, answered, committed
from master_service.api.routes.keyed import AnsweringInJob
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.core.decisions.evaluations.evaluation import in_force
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records import MetricBatch, MetricsTaken

router = APIRouter(tags=["metrics"])
MOST_STEP = 2**62


@router.get("/metrics", operation_id="listMetrics")
async def list_metrics(
    master: MasterOf, metric: str = "step_loss", page_size: PageSize = 100, page_token: PageToken = ""
) -> MetricPage:
    """`step_loss` or `epoch_loss`. The oldest steps are forgotten."""
    master.term  # noqa: B018  a standby has none: NotLeader
    return render.metrics(master.metrics, metric, page_size, page_token)


@router.get("/metric-series", operation_id="listMetricSeries")
async def list_metric_series(
    jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> SeriesPage:
    """The metrics that are kept by step: `loss`, what the script logs, `lr`, `time.*`, `records_per_second`, and `evaluation.*`. They lie
    beside the job's checkpoints, so they outlive masters; of a job that nobody leads now they are read there."""
    found = await metrics_of(jobs, request.path_params.get("job"))
    return render.series_page(found.table, page_size, page_token)


@router.get("/metric-series/{name}", operation_id="queryMetric")
async def query_metric(
    jobs: JobsOf,
    request: Request,
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
    found = await metrics_of(jobs, request.path_params.get("job"))
    shown = render.epoch_points if by == "epoch" else render.series_points
    return shown(found, name, from_step, to_step, points)


@router.get("/evaluations", operation_id="listEvaluations")
async def list_evaluations(
    jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> EvaluationPage:
    """Those that were done while the job trained, the newest first; at most the last 1,000 are kept. The one after training is the
    job's result."""
    found = await evaluations_of(jobs, request.path_params.get("job"))
    return render.evaluations(found, page_size, page_token)


@router.post("/metric-batches", operation_id="reportMetrics")
async def report_metrics(master: MasterOf, answering: AnsweringInJob, batch: MetricBatch) -> MetricsTaken:
    """What trainers report of steps: their shares, which add up, or (the owner of lane 0) whole steps, each of which counts once."""
    return await answering.answer(
        MetricsTaken, partial(master.report_metrics, batch), lambda taken: taken or MetricsTaken()
    )


def find_led(jobs: JobsLed, job: str | None) -> Master | None:
    """None: nobody leads that job of the cluster now. Raises NotFound, NotLeader, NotReady; Conflict if `job` is None and there are
    several."""
    try:
        return jobs.find(job)
    except Conflict:
        if not isinstance(jobs, ClusterMaster) or job is None:
            raise
        return None


async def metrics_of(jobs: JobsLed, job: str | None) -> KeptMetrics:
    """Raises StorageUnreachable as well, and TooManyRequests, DeadlineExceeded."""
    if (master := find_led(jobs, job)) is not None:
        term = master.term
        series = term.series
        return KeptMetrics(series.table, series.epochs, series.known, term.job.state.timeline, master.metrics.step)
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    stored = await jobs.series_of(job)
    return KeptMetrics(stored.table, stored.steps.epochs, stored.steps.next)


async def evaluations_of(jobs: JobsLed, job: str | None) -> Sequence[Evaluation]:
    """In the order of their numbers. Raises PeerError as well."""
    if (master := find_led(jobs, job)) is not None:
        return await committed(master, lambda: in_force(master.job))
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    return await answered(jobs.evaluations_of(job))
