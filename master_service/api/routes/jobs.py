"""The jobs of a cluster: submit, list, pause, resume, cancel, delete; its pool, and its schedules. Everything inside one job is in the other modules."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from master_service.api import render_cluster
from master_service.api.routes.dependencies import (
    AnsweringInCluster,
    ExpectedVersion,
    JobName,
    PageSize,
    PageToken,
    ReadingIf,
    answered,
)
from master_service.cluster.leader import ClusterMaster
from master_service.core.explanation.explain import explain_unled, failing_places
from master_service.leadership.explanation import explain_job as explain_master
from master_service.trackers.made import check as check_trackers
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Standing
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest import Empty, JobView, MasterView
from trireme_shared.protocol.rest_cluster import (
    ClusterJobPage,
    ClusterJobView,
    CreateJob,
    CreateSchedule,
    JobSource,
    JobTaskPage,
    PoolMemberPage,
    PoolMemberView,
    PoolView,
    SchedulePage,
    ScheduleView,
)

router = APIRouter(prefix="/v1", tags=["jobs"])
pool = APIRouter(prefix="/v1", tags=["pool"])

Member = Annotated[str, Path(max_length=200, description="id of a member of the pool")]


async def cluster_of(request: Request) -> ClusterMaster:
    cluster: ClusterMaster = request.app.state.jobs
    return cluster


ClusterOf = Annotated[ClusterMaster, Depends(cluster_of)]


def job_of(asked: CreateJob, storage_url: str) -> ClusterJob:
    """`storage_url`: the cluster's. Raises InvalidArgument."""
    if asked.settings.dispatch != "master":
        raise InvalidArgument("dispatch etcd is for jobs without a master; a cluster's jobs have one")
    check_trackers(asked.settings.trackers)
    spec = JobSpec(
        job=asked.name,
        script=asked.source.script if asked.source else asked.script,
        storage=asked.storage or files.join(storage_url, asked.name),
        **{name: getattr(asked.settings, name) for name in JobSettings.model_fields},
    )
    return ClusterJob(
        job=asked.name,
        spec=spec,
        scheduling=asked.scheduling,
        source_digest=asked.source.digest if asked.source else "",
        create_time=clock.timestamp(),
    )


def schedule_of(asked: CreateSchedule, storage_url: str) -> JobSchedule:
    """`storage_url`: the cluster's. Raises InvalidArgument."""
    job = job_of(asked, storage_url)
    return JobSchedule(
        name=asked.name,
        cron=asked.cron,
        time_zone=asked.time_zone,
        concurrency=asked.concurrency,
        spec=job.spec.with_fields(storage=asked.storage or storage_url),
        scheduling=job.scheduling,
        source_digest=job.source_digest,
    )


@router.post("/jobs", operation_id="createJob", status_code=201)
async def create_job(cluster: ClusterOf, asked: CreateJob, answering: AnsweringInCluster) -> ClusterJobView:
    """Queue a job. It starts when the pool has its parameter servers and `min_trainers` for it."""
    job = job_of(asked, cluster.storage_url)
    call = partial(cluster.create_job, job, asked.source)
    return await answering.answer(ClusterJobView, call, partial(render_cluster.job, cluster.term))


@router.get("/jobs", operation_id="listJobs")
async def list_jobs(
    cluster: ClusterOf,
    state: Annotated[Standing | None, Query(description="only those with this standing")] = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> ClusterJobPage:
    """In the order of their submission."""
    return render_cluster.jobs(cluster.term, state, page_size, page_token)


@router.get("/jobs/{job}", operation_id="getJob", response_model=JobView)
async def get_job(cluster: ClusterOf, reading: ReadingIf, job: JobName) -> Response:
    """As far as it is: of a job that is not ACTIVE, what its last term left."""
    term = cluster.term
    found = term.state.job(job)
    leader = MasterView(master_id=cluster.name, url=cluster.url, term=term.lock.term)
    if (led := term.jobs.get(job)) is not None and led.master.current_term is not None:
        view = await render_cluster.led(term, led.master, found, leader)
    else:
        view = render_cluster.resting(found, await answered(cluster.state_of(job)), leader)
    return reading.answer(view, view.version)


@router.get("/jobs/{job}/explanation", operation_id="explainJob")
async def explain_job(cluster: ClusterOf, job: JobName) -> Explanation:
    """Why it does not progress, and what to do: the most important cause, and in `also` the others."""
    term = cluster.term
    found = term.state.job(job)
    led = term.jobs.get(job)
    if led is None:
        return explain_unled(term.state, found, clock.wall_time(), await answered(cluster.state_of(job)))
    told = await explain_master(led.master, len(term.state.assigned_to(job, "trainer")))
    failing = failing_places(term.state, found)
    return told if failing is None else told.with_fields(also=(failing, *told.also))


@router.get("/jobs/{job}/job-tasks", operation_id="listJobTasks")
async def list_job_tasks(cluster: ClusterOf, job: JobName) -> JobTaskPage:
    """Its pre-tasks and post-tasks, how each stands, and what it printed."""
    return render_cluster.job_tasks(cluster.term, cluster.state.job(job))


@router.get("/jobs/{job}/source", operation_id="getJobSource")
async def get_job_source(cluster: ClusterOf, job: JobName) -> JobSource:
    """The script that was submitted with the job."""
    found = cluster.state.job(job)
    source = await answered(cluster.source_of(job))
    return JobSource(digest=found.source_digest, file_name=source.file_name, text=source.text, modules=source.modules)


@router.post("/jobs/{job}/pause", operation_id="pauseJob")
async def pause_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It saves a checkpoint, its members become free, and it stays PAUSED until it is resumed."""
    view = partial(render_cluster.job, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.pause_job, job, expected=expected), view)


@router.post("/jobs/{job}/resume", operation_id="resumeJob")
async def resume_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It is QUEUED again and goes on from its newest checkpoint."""
    view = partial(render_cluster.job, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.resume_job, job, expected=expected), view)


@router.post("/jobs/{job}/cancel", operation_id="cancelJob")
async def cancel_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It stops for good, without a checkpoint of its last steps. Its checkpoints stay until it is deleted."""
    view = partial(render_cluster.job, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.cancel_job, job, expected=expected), view)


@router.delete("/jobs/{job}", operation_id="deleteJob")
async def delete_job(cluster: ClusterOf, expected: ExpectedVersion, job: JobName) -> ClusterJobView:
    """Of a job that has ended: its keys, and its files below the cluster's storage, are deleted. Once that was begun, the same request
    again waits for its end, whatever it expects."""
    return render_cluster.job(cluster.term, await answered(cluster.delete_job(job, expected), longer_s=30.0))


@pool.get("/pool", operation_id="getPool")
async def get_pool(cluster: ClusterOf) -> PoolView:
    """How many members there are, and how many the jobs need: for whoever adds members."""
    return render_cluster.pool(cluster.term)


@pool.get("/pool-members", operation_id="listPoolMembers")
async def list_pool_members(
    cluster: ClusterOf, page_size: PageSize = 100, page_token: PageToken = ""
) -> PoolMemberPage:
    """The places for trainers and parameter servers, idle or assigned."""
    return render_cluster.pool_members(cluster.term, page_size, page_token)


@pool.get("/pool-members/{member}", operation_id="getPoolMember", response_model=PoolMemberView)
async def get_pool_member(cluster: ClusterOf, reading: ReadingIf, member: Member) -> Response:
    """One place, also a drained one that has no member now."""
    view = render_cluster.pool_member(cluster.state, cluster.state.place(member))
    return reading.answer(view, view.version)


@pool.post("/pool-members/{member}/drain", operation_id="drainPoolMember")
async def drain_pool_member(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, member: Member
) -> PoolMemberView:
    """It takes no new work. What it runs leaves as when it is moved to another job; then the member is `drained`, and stays so until
    undrainPoolMember, also when it registers anew."""
    view = partial(render_cluster.drained, cluster.state)
    return await answering.answer(PoolMemberView, partial(cluster.drain_member, member, expected=expected), view)


@pool.post("/pool-members/{member}/undrain", operation_id="undrainPoolMember")
async def undrain_pool_member(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, member: Member
) -> Empty:
    """It may get work again."""
    call = partial(cluster.undrain_member, member, expected=expected)
    return await answering.answer(Empty, call, lambda _: Empty())


schedules = APIRouter(prefix="/v1/schedules", tags=["schedules"])


@schedules.post("", operation_id="createSchedule", status_code=201)
async def create_schedule(cluster: ClusterOf, asked: CreateSchedule, answering: AnsweringInCluster) -> ScheduleView:
    """Its jobs are called `<name>-<UTC time as yyyymmddhhmm>`. Of times that pass while no master lives the latest one runs."""
    found = schedule_of(asked, cluster.storage_url)
    return await answering.answer(
        ScheduleView, partial(cluster.create_schedule, found, asked.source), render_cluster.schedule
    )


@schedules.get("", operation_id="listSchedules")
async def list_schedules(cluster: ClusterOf, page_size: PageSize = 100, page_token: PageToken = "") -> SchedulePage:
    """In the order of their names."""
    return render_cluster.schedules(cluster.term, page_size, page_token)


@schedules.get("/{schedule}", operation_id="getSchedule", response_model=ScheduleView)
async def get_schedule(cluster: ClusterOf, reading: ReadingIf, schedule: str) -> Response:
    """One schedule, and when its next job is created."""
    view = render_cluster.schedule(cluster.state.schedule(schedule))
    return reading.answer(view, view.version)


@schedules.delete("/{schedule}", operation_id="deleteSchedule")
async def delete_schedule(cluster: ClusterOf, expected: ExpectedVersion, schedule: str) -> ScheduleView:
    """No more jobs are created; those that were created go on."""
    return render_cluster.schedule(await answered(cluster.delete_schedule(schedule, expected)))
