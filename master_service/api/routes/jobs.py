"""The jobs of a cluster: submit, list, pause, resume, cancel, delete; its pool, and its schedules. Routes
first, then what their answers show."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from master_service.api import render
from master_service.api.render import page_of
from master_service.api.routes.dependencies import (
    AnsweringInCluster,
    ExpectedVersion,
    JobName,
    Key,
    PageSize,
    PageToken,
    ReadingIf,
    WaitS,
    answered,
    asked_by,
    keyed_request,
)
from master_service.api.routes.operations import AskingFor
from master_service.cluster.leader import ClusterMaster
from master_service.cluster.term import ClusterTerm
from master_service.core.decisions.requests import version_of_job, version_of_place, version_of_schedule
from master_service.core.decisions.scheduling.admission import needed
from master_service.core.explanation.explain import explain_unled, failing_places
from master_service.core.state.cluster import ClusterState, Place, run_of
from master_service.leadership.explanation import explain_job as explain_master
from master_service.leadership.master import Master
from master_service.trackers.made import check as check_trackers
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.explanations import Explanation
from trireme_shared.protocol.records import JobSpec, JobState, Phase
from trireme_shared.protocol.records.cluster import (
    ClusterJob,
    JobSchedule,
    Kind,
    Outcome,
    PoolMember,
    Standing,
)
from trireme_shared.protocol.records.job_choices import JobTask
from trireme_shared.protocol.records.job_spec import JobSettings, check_size
from trireme_shared.protocol.records.operations import Operation
from trireme_shared.protocol.rest import Empty, JobPage, JobProgress, JobView, MasterView, MemberCounts
from trireme_shared.protocol.rest_cluster import (
    CreateJob,
    CreateSchedule,
    JobSource,
    JobTaskPage,
    JobTaskView,
    PoolKind,
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
    """`storage_url`: the cluster's. Raises InvalidArgument, TooLarge."""
    if asked.settings.dispatch != "master":
        raise InvalidArgument("dispatch etcd is for jobs without a master; a cluster's jobs have one")
    check_trackers(asked.settings.trackers)
    spec = JobSpec(
        job=asked.name,
        script=asked.source.script if asked.source else asked.script,
        storage=asked.storage or files.join(storage_url, asked.name),
        **{name: getattr(asked.settings, name) for name in JobSettings.model_fields},
    )
    check_size(spec)
    return ClusterJob(
        job=asked.name,
        spec=spec,
        scheduling=asked.scheduling,
        source_digest=asked.source.digest if asked.source else "",
        create_time=clock.timestamp(),
    )


def schedule_of(asked: CreateSchedule, storage_url: str) -> JobSchedule:
    """`storage_url`: the cluster's. Raises InvalidArgument, TooLarge."""
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
async def create_job(
    cluster: ClusterOf, asked: CreateJob, answering: AnsweringInCluster, response: Response
) -> JobView:
    """Queue a job. It starts when the pool has its parameter servers and `min_trainers` for it."""
    await cluster.check_storage(asked.storage)
    job, state, leader = job_of(asked, cluster.storage_url), cluster.state, leader_view(cluster)
    response.headers["Location"] = f"/v1/jobs/{job.job}"

    def kept(made: ClusterJob) -> JobView:
        """With its key: without the settings, which are large, and which the same request brings again."""
        view = resting_view(state, made, leader, JobState())
        return view.with_fields(settings=None, sources={})

    call = partial(cluster.create_job, job, asked.source)
    view = await answering.answer(JobView, call, kept, lambda: kept(state.job(job.job)))
    return view.with_fields(settings=job.spec, sources=job.spec.sources)


@router.get("/jobs", operation_id="listJobs", response_model=JobPage)
async def list_jobs(
    cluster: ClusterOf,
    request: Request,
    state: Annotated[Standing | None, Query(description="only those with this standing")] = None,
    newest_first: Annotated[bool, Query(description="begin with the job that was submitted last")] = False,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Response:
    """In the order of their submission; without what only getJob tells."""
    term, rendered = cluster.term, request.app.state.rendered_jobs
    found, token = jobs_of_page(term, state, page_size, page_token, newest_first=newest_first)
    content = await rendered.page(term, leader_view(cluster), found, token)
    return Response(content, media_type="application/json")


@router.get("/jobs/{job}", operation_id="getJob", response_model=JobView)
async def get_job(cluster: ClusterOf, reading: ReadingIf, job: JobName) -> Response:
    """As far as it is: of a job that is not ACTIVE, what its last term left."""
    term, leader = cluster.term, leader_view(cluster)
    found = term.state.job(job)
    if (led := term.jobs.get(job)) is not None and led.master.current_term is not None:
        view = await led_view(term, led.master, found, leader)
    else:
        view = resting_view(term.state, found, leader, await _last_state(cluster, found))
    return reading.answer(view, view.version)


async def _last_state(cluster: ClusterMaster, found: ClusterJob) -> JobState:
    """As its last term left it; of a job that this version cannot read nothing is known."""
    if found.standing is Standing.UNREADABLE:
        return JobState()
    return await answered(cluster.state_of(found.job))


@router.get("/jobs/{job}/explanation", operation_id="explainJob")
async def explain_job(cluster: ClusterOf, job: JobName) -> Explanation:
    """Why it does not progress, and what to do: the most important cause, and in `also` the others."""
    term = cluster.term
    found = term.state.job(job)
    led = term.jobs.get(job)
    if led is None:
        return explain_unled(term.state, found, clock.wall_time(), await _last_state(cluster, found))
    told = await explain_master(led.master, len(term.state.assigned_to(job, "trainer")))
    failing = failing_places(term.state, found)
    return told if failing is None else told.with_fields(also=(failing, *told.also))


@router.get("/jobs/{job}/job-tasks", operation_id="listJobTasks")
async def list_job_tasks(cluster: ClusterOf, job: JobName) -> JobTaskPage:
    """Its pre-tasks and post-tasks, how each stands, and what it printed."""
    return job_task_page(cluster.term, cluster.state.job(job))


@router.get("/jobs/{job}/source", operation_id="getJobSource")
async def get_job_source(cluster: ClusterOf, job: JobName) -> JobSource:
    """The script that was submitted with the job."""
    found = cluster.state.job(job)
    source = await answered(cluster.source_of(job))
    return JobSource(
        digest=found.source_digest, file_name=source.file_name, text=source.text, modules=source.modules
    )


async def _asking(
    cluster: ClusterOf,
    request: Request,
    response: Response,
    job: JobName,
    idempotency_key: Key = "",
    wait_s: WaitS = 0.0,
) -> AskingFor:
    keyed = await keyed_request(request, idempotency_key)
    return AskingFor(job, cluster, response, keyed, asked_by(request), wait_s)


async def _asking_to_delete(
    cluster: ClusterOf, request: Request, response: Response, job: JobName, wait_s: WaitS = 0.0
) -> AskingFor:
    """Without a key: a job is deleted once."""
    return AskingFor(job, cluster, response, None, asked_by(request), wait_s)


Asking = Annotated[AskingFor, Depends(_asking)]
AskingToDelete = Annotated[AskingFor, Depends(_asking_to_delete)]


@router.post("/jobs/{job}/pause", operation_id="pauseJob", status_code=202)
async def pause_job(cluster: ClusterOf, asking: Asking, expected: ExpectedVersion, job: JobName) -> Operation:
    """It saves a checkpoint, its members become free, and it stays PAUSED until it is resumed."""
    return await asking.begin(lambda once: cluster.pause_job(job, once, expected, asking.by))


@router.post("/jobs/{job}/resume", operation_id="resumeJob", status_code=202)
async def resume_job(
    cluster: ClusterOf, asking: Asking, expected: ExpectedVersion, job: JobName
) -> Operation:
    """It is QUEUED again and goes on from its newest checkpoint. The operation is DONE then; the job begins
    once it gets members."""
    return await asking.begin(lambda once: cluster.resume_job(job, once, expected, asking.by))


@router.post("/jobs/{job}/cancel", operation_id="cancelJob", status_code=202)
async def cancel_job(
    cluster: ClusterOf, asking: Asking, expected: ExpectedVersion, job: JobName
) -> Operation:
    """It stops for good, without a checkpoint of its last steps. Its checkpoints stay until it is deleted."""
    return await asking.begin(lambda once: cluster.cancel_job(job, once, expected, asking.by))


@router.delete("/jobs/{job}", operation_id="deleteJob", status_code=202)
async def delete_job(
    cluster: ClusterOf, asking: AskingToDelete, expected: ExpectedVersion, job: JobName
) -> Operation:
    """Of a job that has ended: its keys, and its files below the cluster's storage, are deleted. Once that
    was begun, the same request again is answered by the same operation, whatever it expects."""
    return await asking.begin(lambda _: cluster.begin_delete(job, expected, asking.by))


@pool.get("/pool", operation_id="getPool", response_model=PoolView)
async def get_pool(cluster: ClusterOf, request: Request) -> Response:
    """How many members there are, and how many the jobs need: for whoever adds members."""
    term, rendered = cluster.term, request.app.state.rendered_pool
    content = rendered.content(term, None, partial(pool_view, term))
    return Response(content, media_type="application/json")


@pool.get("/pool-members", operation_id="listPoolMembers", response_model=PoolMemberPage)
async def list_pool_members(
    cluster: ClusterOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> Response:
    """The places for trainers and parameter servers, idle or assigned."""
    term, rendered = cluster.term, request.app.state.rendered_pool
    page = partial(pool_member_page, term, page_size, page_token)
    content = rendered.content(term, (page_size, page_token), page)
    return Response(content, media_type="application/json")


@pool.get("/pool-members/{member}", operation_id="getPoolMember", response_model=PoolMemberView)
async def get_pool_member(cluster: ClusterOf, reading: ReadingIf, member: Member) -> Response:
    """One place, also a drained one that has no member now."""
    view = pool_member_view(cluster.state, cluster.state.place(member))
    return reading.answer(view, view.version)


@pool.post("/pool-members/{member}/drain", operation_id="drainPoolMember")
async def drain_pool_member(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, member: Member
) -> PoolMemberView:
    """It takes no new work. What it runs leaves as when it is moved to another job; then the member is
    `drained`, and stays so until undrainPoolMember, also when it registers anew."""
    view = partial(drained_view, cluster.state)
    return await answering.answer(
        PoolMemberView, partial(cluster.drain_member, member, expected=expected), view
    )


@pool.post("/pool-members/{member}/undrain", operation_id="undrainPoolMember")
async def undrain_pool_member(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, member: Member
) -> Empty:
    """It may get work again."""
    call = partial(cluster.undrain_member, member, expected=expected)
    return await answering.answer(Empty, call, lambda _: Empty())


schedules = APIRouter(prefix="/v1/schedules", tags=["schedules"])


@schedules.post("", operation_id="createSchedule", status_code=201)
async def create_schedule(
    cluster: ClusterOf, asked: CreateSchedule, answering: AnsweringInCluster, response: Response
) -> ScheduleView:
    """Its jobs are called `<name>-<UTC time as yyyymmddhhmm>`. Of times that pass while no master lives the
    latest one runs."""
    await cluster.check_storage(asked.storage)
    found = schedule_of(asked, cluster.storage_url)
    response.headers["Location"] = f"/v1/schedules/{found.name}"
    return await answering.answer(
        ScheduleView, partial(cluster.create_schedule, found, asked.source), schedule_view
    )


@schedules.get("", operation_id="listSchedules")
async def list_schedules(
    cluster: ClusterOf, page_size: PageSize = 100, page_token: PageToken = ""
) -> SchedulePage:
    """In the order of their names."""
    return schedule_page(cluster.term, page_size, page_token)


@schedules.get("/{schedule}", operation_id="getSchedule", response_model=ScheduleView)
async def get_schedule(cluster: ClusterOf, reading: ReadingIf, schedule: str) -> Response:
    """One schedule, and when its next job is created."""
    view = schedule_view(cluster.state.schedule(schedule))
    return reading.answer(view, view.version)


@schedules.delete("/{schedule}", operation_id="deleteSchedule")
async def delete_schedule(cluster: ClusterOf, expected: ExpectedVersion, schedule: str) -> ScheduleView:
    """No more jobs are created; those that were created go on."""
    return schedule_view(await answered(cluster.delete_schedule(schedule, expected)))


AWAY = "it is not registered"


# ------------------------------------------------ views: jobs of a cluster and its pool as answers, read only


def of_cluster(view: JobView, found: ClusterJob) -> JobView:
    """With what only the cluster knows of the job."""
    return view.with_fields(
        standing=str(found.standing),
        wanted=found.wanted,
        scheduling=found.scheduling,
        starts=found.epoch,
        source_digest=found.source_digest,
        create_time=found.create_time,
        start_time=found.start_time,
        end_time=found.end_time,
        version=version_of_job(found),
    )


def listed_view(term: ClusterTerm, found: ClusterJob, leader: MasterView) -> JobView:
    led = term.jobs.get(found.job)
    leading = led.master.current_term if led is not None else None
    if led is None or leading is None:
        return resting_view(term.state, found, leader)
    view = render.summary(leading.job, led.master.metrics, leader)
    return of_cluster(_with_places(view, term.state, found), found)


def jobs_of_page(
    term: ClusterTerm, standing: Standing | None, page_size: int, page_token: str, *, newest_first: bool
) -> tuple[Sequence[ClusterJob], str]:
    """With the token of the next page."""
    found = [each for each in term.state.jobs.values() if standing is None or each.standing is standing]
    return page_of(
        found, lambda each: (each.number, each.job), page_size, page_token, newest_first=newest_first
    )


def job_task_page(term: ClusterTerm, found: ClusterJob) -> JobTaskPage:
    """Pre-tasks, then post-tasks, in their order."""
    runs = term.state.task_runs.get(found.job, {})

    def view(name: str, task: JobTask) -> JobTaskView:
        run = run_of(found, runs, name)
        given = task.model_dump(include=set(JobTaskView.model_fields))
        ran = run.model_dump(include=set(JobTaskView.model_fields))
        return JobTaskView(**given | ran, member_id=run.member)

    return JobTaskPage(job_tasks=tuple(view(*item) for item in found.spec.named_tasks.items()))


async def led_view(term: ClusterTerm, master: Master, found: ClusterJob, leader: MasterView) -> JobView:
    """Of a job that is led now."""
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    view = render.job(master.job, master.metrics, leader, stalled)
    return of_cluster(_with_places(view, term.state, found), found)


def _with_places(view: JobView, state: ClusterState, found: ClusterJob) -> JobView:
    """Trainers are desired as many as the schedule gives it."""
    places = len(state.assigned_to(found.job, "trainer"))
    return view.with_fields(members=view.members.with_fields(trainers_desired=places))


def resting_view(
    state: ClusterState, found: ClusterJob, leader: MasterView, left: JobState | None = None
) -> JobView:
    """Of a job that nobody leads now. `left`: as its last term left it; None: for a list."""
    spec, active = found.spec, found.standing is Standing.ACTIVE
    known = found.outcome or Outcome()
    phase = left.phase if left is not None else Phase.WAITING
    view = JobView(
        job=found.job,
        state="STARTING" if active else str(found.standing),
        phase=str(phase if active else found.standing),
        reason=found.reason or (left.reason if left else ""),
        mode=spec.mode,
        progress=JobProgress(
            epoch=known.epoch,
            epochs=spec.epochs,
            step=known.step,
            loss=known.loss,
            records_done=known.records_done,
            records_total=known.records_total,
        ),
        metrics=known.metrics,
        failure=known.failure,
        members=_places_of(state, found) if active else _wanted_by(found),
        master=leader,
        script=spec.script,
        storage=spec.storage,
    )
    if left is not None:
        trained = left.result.trained_records
        progress = view.progress
        if left.phase is Phase.COMPLETED:
            progress = progress.with_fields(records_done=trained, records_total=trained)
        elif found.outcome is None:  # a version before this one led it
            progress = progress.with_fields(records_done=trained)
        view = view.with_fields(
            stage=left.stage,
            generation=left.generation,
            failure=left.failure,
            losses=left.result.losses,
            progress=progress,
            result=left.result,
            settings=spec,
            history=spec.history,
            sources=spec.sources,
        )
    return of_cluster(view, found)


def leader_view(cluster: ClusterMaster) -> MasterView:
    return MasterView(master_id=cluster.name, url=cluster.url, term=cluster.term.lock.term)


def pool_view(term: ClusterTerm) -> PoolView:
    state = term.state
    wants = needed(state, clock.wall_time())

    def counts(kind: Kind) -> PoolKind:
        there = [
            (place, member, place in state.assignments)
            for place, member in state.members.items()
            if place[0] == kind
        ]
        return PoolKind(
            members=len(there),
            idle=sum(
                state.takes_work(place) and not (held or member.running) for place, member, held in there
            ),
            draining=sum(not state.takes_work(place) for place, _, _ in there),
            needed=wants[kind],
        )

    return PoolView(trainers=counts("trainer"), pservers=counts("pserver"))


def pool_member_page(term: ClusterTerm, page_size: int, page_token: str) -> PoolMemberPage:
    """In the order of their kinds and names."""
    places = term.state.members.keys() | term.state.drains.keys()
    page, token = page_of(places, lambda place: place, page_size, page_token)
    return PoolMemberPage(
        members=tuple(pool_member_view(term.state, place) for place in page), next_page_token=token
    )


def schedule_view(found: JobSchedule) -> ScheduleView:
    shown = {name: getattr(found, name) for name in ScheduleView.model_fields if name != "version"}
    return ScheduleView(**shown, version=version_of_schedule(found))


def schedule_page(term: ClusterTerm, page_size: int, page_token: str) -> SchedulePage:
    """In the order of their names."""
    found = (term.state.schedules | term.state.unreadable_schedules).values()
    page, token = page_of(found, lambda each: (each.name,), page_size, page_token)
    return SchedulePage(schedules=tuple(schedule_view(each) for each in page), next_page_token=token)


def drained_view(state: ClusterState, place: Place) -> PoolMemberView:
    """As it is once it is drained."""
    return pool_member_view(state, place, takes_work=False)


def pool_member_view(state: ClusterState, place: Place, *, takes_work: bool = True) -> PoolMemberView:
    member, assignment = state.members.get(place), state.assignments.get(place)
    version = version_of_place(place, drained=not takes_work or place in state.drains)
    if member is None:
        away = {"host": "", "agent": "", "state": "drained", "trouble": AWAY}
        return PoolMemberView(member_id=place[1], kind=place[0], version=version, **away)
    if not (takes_work and state.takes_work(place)):
        leaves = member.draining or member.running or assignment is not None
        name, of = ("draining" if leaves else "drained"), member.running
    elif assignment is None:
        name, of = ("leaving" if member.running else "idle"), member.running
    else:
        runs = (member.running, member.epoch, member.task) == (
            assignment.job,
            assignment.epoch,
            assignment.task,
        )
        name, of = ("running" if runs else "assigned"), assignment.job
    return PoolMemberView(
        member_id=member.member,
        kind=member.kind,
        host=member.host,
        agent=member.agent,
        state=name,
        job=of,
        task=member.task,
        trouble=member.trouble,
        cores=member.cores,
        memory_bytes=member.memory_bytes,
        device=member.device,
        trireme_version=member.trireme_version,
        version=version,
    )


def _wanted_by(found: ClusterJob) -> MemberCounts:
    return MemberCounts(
        trainers=0,
        trainers_desired=found.most_trainers,
        pservers=0,
        pservers_desired=found.pservers_wanted,
    )


def _places_of(state: ClusterState, found: ClusterJob) -> MemberCounts:
    """Of a job that nobody leads yet: a process that runs counts as its member."""

    def count(kind: Kind) -> tuple[int, int]:
        places = state.assigned_to(found.job, kind)
        return sum(_runs(state.members.get(place), found) for place in places), len(places)

    (trainers, of_trainers), (pservers, of_pservers) = count("trainer"), count("pserver")
    return MemberCounts(
        trainers=trainers, trainers_desired=of_trainers, pservers=pservers, pservers_desired=of_pservers
    )


def _runs(member: PoolMember | None, job: ClusterJob) -> bool:
    return member is not None and (member.running, member.epoch) == (job.job, job.epoch)
