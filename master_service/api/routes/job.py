"""One job: how it stands, why it does not progress, its members, and what it has found out (metrics,
evaluations), which stays when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from master_service.api import render
from master_service.api.render import KeptMetrics
from master_service.api.routes.dependencies import (
    AnsweringInJob,
    JobsOf,
    MasterOf,
    PageSize,
    PageToken,
    ReadingIf,
    answered,
    committed,
    empty,
)
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.core.decisions.evaluation import in_force
from master_service.leadership.explanation import explain_job as explain_master
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.records import MetricBatch, MetricsTaken, UserFailure
from trireme_shared.protocol.rest import (
    Empty,
    EvaluationPage,
    JobView,
    MasterView,
    MemberPage,
    MemberView,
    MetricPage,
    SeriesPage,
    SeriesPoints,
    SuspectAnswer,
)

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
    """The most important cause, and in `also` the others. Answers while the master takes over and while etcd
    is silent, too."""
    return await explain_master(master)


members = APIRouter(prefix="/members", tags=["members"])


@members.get("", operation_id="listMembers")
async def list_members(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> MemberPage:
    """Parameter servers, then trainers, that hold a lease now."""
    return await committed(master, lambda: render.members(master.job, page_size, page_token))


@members.get("/{member_id}", operation_id="getMember")
async def get_member(master: MasterOf, member_id: str) -> MemberView:
    """One member, and what it works on."""
    return await committed(master, lambda: render.member_view(master.job, master.find_members(member_id)[0]))


@members.post("/{member_id}/suspect", operation_id="reportSuspect")
async def report_suspect(master: MasterOf, answering: AnsweringInJob, member_id: str) -> SuspectAnswer:
    """The master probes the member and revokes its lease if nothing listens there."""
    call = partial(master.report_suspect, member_id)
    return await answering.answer(SuspectAnswer, call, lambda dead: SuspectAnswer(dead=dead))


@members.post("/{member_id}/failures", operation_id="reportFailure")
async def report_failure(
    master: MasterOf, answering: AnsweringInJob, member_id: str, failure: UserFailure
) -> Empty:
    """The user's code failed outside a task."""
    return await answering.answer(Empty, partial(master.report_failure, member_id, failure), empty)


metrics = APIRouter(tags=["metrics"])
MOST_STEP = 2**62


@metrics.get("/metrics", operation_id="listMetrics")
async def list_metrics(
    master: MasterOf, metric: str = "step_loss", page_size: PageSize = 100, page_token: PageToken = ""
) -> MetricPage:
    """`step_loss` or `epoch_loss`. The oldest steps are forgotten."""
    master.term  # noqa: B018  a standby has none: NotLeader
    return render.metrics(master.metrics, metric, page_size, page_token)


@metrics.get("/metric-series", operation_id="listMetricSeries")
async def list_metric_series(
    jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> SeriesPage:
    """The metrics that are kept by step: `loss`, what the script logs, `lr`, `time.*`, `records_per_second`,
    and `evaluation.*`. They lie beside the job's checkpoints, so they outlive masters; of a job that nobody
    leads now they are read there."""
    found = await metrics_of(jobs, request.path_params.get("job"))
    return render.series_page(found.table, page_size, page_token)


@metrics.get("/metric-series/{name}", operation_id="queryMetric")
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
    """A metric by step. Steps share a point where there are more of them than points. Steps that are trained
    again after a return to a checkpoint are shown once they are."""
    found = await metrics_of(jobs, request.path_params.get("job"))
    shown = render.epoch_points if by == "epoch" else render.series_points
    return shown(found, name, from_step, to_step, points)


@metrics.get("/evaluations", operation_id="listEvaluations")
async def list_evaluations(
    jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> EvaluationPage:
    """Those that were done while the job trained, the newest first; at most the last 1,000 are kept. The one
    after training is the job's result."""
    found = await evaluations_of(jobs, request.path_params.get("job"))
    return render.evaluations(found, page_size, page_token)


@metrics.post("/metric-batches", operation_id="reportMetrics")
async def report_metrics(master: MasterOf, answering: AnsweringInJob, batch: MetricBatch) -> MetricsTaken:
    """What trainers report of steps: their shares, which add up, or (the owner of lane 0) whole steps, each
    of which counts once."""
    return await answering.answer(
        MetricsTaken, partial(master.report_metrics, batch), lambda taken: taken or MetricsTaken()
    )


def find_led_now(jobs: JobsLed, job: str | None) -> Master | None:
    """As `find_led`, but it raises NotReady while a job is taken over: its metrics are about to be there.
    Raises NotFound, NotLeader; Conflict if `job` is None and there are several."""
    try:
        return jobs.find(job)
    except Conflict:
        if not isinstance(jobs, ClusterMaster) or job is None:
            raise
        return None


async def metrics_of(jobs: JobsLed, job: str | None) -> KeptMetrics:
    """Raises StorageUnreachable as well, and TooManyRequests, DeadlineExceeded."""
    if (master := find_led_now(jobs, job)) is not None:
        term = master.term
        series = term.series
        return KeptMetrics(
            series.table, series.epochs, series.known, term.job.state.timeline, master.metrics.step
        )
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    stored = await jobs.series_of(job)
    return KeptMetrics(stored.table, stored.steps.epochs, stored.steps.next)


async def evaluations_of(jobs: JobsLed, job: str | None) -> Sequence[Evaluation]:
    """In the order of their numbers. Raises PeerError as well."""
    if (master := find_led_now(jobs, job)) is not None:
        return await committed(master, lambda: in_force(master.job))
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    return await answered(jobs.evaluations_of(job))
