"""The jobs of a cluster: submit, list, pause, resume, cancel, delete; its pool, and its schedules. Routes
first, then what their answers show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from master_service.api import render
from master_service.api.render import offset_of, page_of
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
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Kind, PoolMember, Standing
from trireme_shared.protocol.records.job_choices import JobTask
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest import Empty, JobProgress, JobView, MasterView, MemberCounts
from trireme_shared.protocol.rest_cluster import (
    ClusterJobPage,
    ClusterJobView,
    CreateJob,
    CreateSchedule,
    JobSource,
    JobTaskPage,
    JobTaskView,
    MembersHeld,
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
    await cluster.check_storage(asked.storage)
    job = job_of(asked, cluster.storage_url)
    call = partial(cluster.create_job, job, asked.source)
    return await answering.answer(ClusterJobView, call, partial(job_view, cluster.term))


@router.get("/jobs", operation_id="listJobs", response_model=ClusterJobPage)
async def list_jobs(
    cluster: ClusterOf,
    request: Request,
    state: Annotated[Standing | None, Query(description="only those with this standing")] = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> Response:
    """In the order of their submission."""
    term, rendered = cluster.term, request.app.state.rendered_jobs
    content = await rendered.page(term, *job_page(term, state, page_size, page_token))
    return Response(content, media_type="application/json")


@router.get("/jobs/{job}", operation_id="getJob", response_model=JobView)
async def get_job(cluster: ClusterOf, reading: ReadingIf, job: JobName) -> Response:
    """As far as it is: of a job that is not ACTIVE, what its last term left."""
    term = cluster.term
    found = term.state.job(job)
    leader = MasterView(master_id=cluster.name, url=cluster.url, term=term.lock.term)
    if (led := term.jobs.get(job)) is not None and led.master.current_term is not None:
        view = await led_view(term, led.master, found, leader)
    else:
        view = resting_view(found, await answered(cluster.state_of(job)), leader)
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
    return job_task_page(cluster.term, cluster.state.job(job))


@router.get("/jobs/{job}/source", operation_id="getJobSource")
async def get_job_source(cluster: ClusterOf, job: JobName) -> JobSource:
    """The script that was submitted with the job."""
    found = cluster.state.job(job)
    source = await answered(cluster.source_of(job))
    return JobSource(
        digest=found.source_digest, file_name=source.file_name, text=source.text, modules=source.modules
    )


@router.post("/jobs/{job}/pause", operation_id="pauseJob")
async def pause_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It saves a checkpoint, its members become free, and it stays PAUSED until it is resumed."""
    view = partial(job_view, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.pause_job, job, expected=expected), view)


@router.post("/jobs/{job}/resume", operation_id="resumeJob")
async def resume_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It is QUEUED again and goes on from its newest checkpoint."""
    view = partial(job_view, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.resume_job, job, expected=expected), view)


@router.post("/jobs/{job}/cancel", operation_id="cancelJob")
async def cancel_job(
    cluster: ClusterOf, answering: AnsweringInCluster, expected: ExpectedVersion, job: JobName
) -> ClusterJobView:
    """It stops for good, without a checkpoint of its last steps. Its checkpoints stay until it is deleted."""
    view = partial(job_view, cluster.term)
    return await answering.answer(ClusterJobView, partial(cluster.cancel_job, job, expected=expected), view)


@router.delete("/jobs/{job}", operation_id="deleteJob")
async def delete_job(cluster: ClusterOf, expected: ExpectedVersion, job: JobName) -> ClusterJobView:
    """Of a job that has ended: its keys, and its files below the cluster's storage, are deleted. Once that
    was begun, the same request again waits for its end, whatever it expects."""
    return job_view(cluster.term, await answered(cluster.delete_job(job, expected), longer_s=30.0))


@pool.get("/pool", operation_id="getPool")
async def get_pool(cluster: ClusterOf) -> PoolView:
    """How many members there are, and how many the jobs need: for whoever adds members."""
    return pool_view(cluster.term)


@pool.get("/pool-members", operation_id="listPoolMembers")
async def list_pool_members(
    cluster: ClusterOf, page_size: PageSize = 100, page_token: PageToken = ""
) -> PoolMemberPage:
    """The places for trainers and parameter servers, idle or assigned."""
    return pool_member_page(cluster.term, page_size, page_token)


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
    cluster: ClusterOf, asked: CreateSchedule, answering: AnsweringInCluster
) -> ScheduleView:
    """Its jobs are called `<name>-<UTC time as yyyymmddhhmm>`. Of times that pass while no master lives the
    latest one runs."""
    await cluster.check_storage(asked.storage)
    found = schedule_of(asked, cluster.storage_url)
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


def job_view(term: ClusterTerm, found: ClusterJob) -> ClusterJobView:
    led = term.jobs.get(found.job)
    leading = led.master.current_term if led is not None else None
    state, reason, progress, present = str(found.standing), found.reason, None, None
    if found.standing is Standing.ACTIVE:
        state = "STARTING"
        if led is not None and leading is not None:
            phase, reason = render.standing(leading.job)
            state, progress = str(phase), render.progress(leading.job, led.master.metrics)
            present = leading.job.members.starters()
    return ClusterJobView(
        job=found.job,
        state=state,
        standing=found.standing,
        reason=reason,
        wanted=found.wanted,
        mode=found.spec.mode,
        scheduling=found.scheduling,
        pservers=found.pservers_wanted,
        members=_held(term.state, found, present),
        starts=found.epoch,
        progress=progress,
        source_digest=found.source_digest,
        create_time=found.create_time,
        start_time=found.start_time,
        end_time=found.end_time,
        version=version_of_job(found),
    )


def job_page(
    term: ClusterTerm, standing: Standing | None, page_size: int, page_token: str
) -> tuple[Sequence[ClusterJob], str]:
    """With the token of the next page."""
    found = [each for each in term.state.jobs.values() if standing is None or each.standing is standing]
    found.sort(key=lambda each: (each.number, each.job))
    return page_of(found, offset_of(page_token), page_size)


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
    """Of a job that is led now. Trainers are desired as many as the schedule gives it."""
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    view = render.job(master.job, master.metrics, leader, stalled)
    members = view.members.with_fields(trainers_desired=_held(term.state, found).trainers)
    return view.with_fields(standing=str(found.standing), members=members, version=version_of_job(found))


def resting_view(found: ClusterJob, state: JobState, leader: MasterView) -> JobView:
    """Of a job that nobody leads now. `state`: as its last term left it."""
    spec = found.spec
    phase = str(state.phase if found.standing is Standing.ACTIVE else found.standing)
    trained = state.result.trained_records
    total = trained if state.phase is Phase.COMPLETED else 0  # of another one the dataset is not known here
    return JobView(
        job=found.job,
        phase=phase,
        stage=state.stage,
        mode=spec.mode,
        generation=state.generation,
        reason=found.reason or state.reason,
        failure=state.failure,
        progress=JobProgress(epoch=0, epochs=spec.epochs, records_done=trained, records_total=total),
        members=MemberCounts(
            trainers=0,
            trainers_desired=found.most_trainers,
            pservers=0,
            pservers_desired=found.pservers_wanted,
        ),
        losses=state.result.losses,
        result=state.result,
        master=leader,
        spec=spec,
        standing=str(found.standing),
        version=version_of_job(found),
    )


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
    places = sorted(term.state.members.keys() | term.state.drains.keys())
    page, token = page_of(places, offset_of(page_token), page_size)
    return PoolMemberPage(
        members=tuple(pool_member_view(term.state, place) for place in page), next_page_token=token
    )


def schedule_view(found: JobSchedule) -> ScheduleView:
    shown = {name: getattr(found, name) for name in ScheduleView.model_fields if name != "version"}
    return ScheduleView(**shown, version=version_of_schedule(found))


def schedule_page(term: ClusterTerm, page_size: int, page_token: str) -> SchedulePage:
    """In the order of their names."""
    found = [term.state.schedules[name] for name in sorted(term.state.schedules)]
    page, token = page_of(found, offset_of(page_token), page_size)
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
        version=version,
    )


def _held(state: ClusterState, found: ClusterJob, present: Collection[str] | None = None) -> MembersHeld:
    """`present`: the names of the pool's members that have a process among the job's members; None: not
    known, because nobody leads the job now. Then a process that runs counts."""

    def there(place: Place) -> bool:
        return place[1] in present if present is not None else _runs(state.members.get(place), found)

    def count(kind: Kind) -> tuple[int, int]:
        places = state.assigned_to(found.job, kind)
        return len(places), sum(map(there, places))

    (trainers, trainers_running), (pservers, pservers_running) = count("trainer"), count("pserver")
    return MembersHeld(
        trainers=trainers,
        trainers_running=trainers_running,
        pservers=pservers,
        pservers_running=pservers_running,
    )


def _runs(member: PoolMember | None, job: ClusterJob) -> bool:
    return member is not None and (member.running, member.epoch) == (job.job, job.epoch)
