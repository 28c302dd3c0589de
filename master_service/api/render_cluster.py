"""Jobs of a cluster and its pool as answers of the REST API. Reads only."""

from __future__ import annotations

from collections.abc import Collection

from master_service.api import render
from master_service.api.render import offset_of, page_of
from master_service.cluster.term import ClusterTerm
from master_service.core.decisions.requests import version_of_job, version_of_place, version_of_schedule
from master_service.core.decisions.scheduling.admission import needed
from master_service.core.state.cluster import ClusterState, Place, run_of
from master_service.leadership.master import Master
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Kind, PoolMember, Standing
from trireme_shared.protocol.records.job_choices import JobTask
from trireme_shared.protocol.rest import JobProgress, JobView, MasterView, MemberCounts
from trireme_shared.protocol.rest_cluster import (
    ClusterJobPage,
    ClusterJobView,
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

AWAY = "it is not registered"


def job(term: ClusterTerm, found: ClusterJob) -> ClusterJobView:
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


def jobs(term: ClusterTerm, standing: Standing | None, page_size: int, page_token: str) -> ClusterJobPage:
    found = [each for each in term.state.jobs.values() if standing is None or each.standing is standing]
    found.sort(key=lambda each: (each.number, each.job))
    page, token = page_of(found, offset_of(page_token), page_size)
    return ClusterJobPage(jobs=tuple(job(term, each) for each in page), next_page_token=token)


def job_tasks(term: ClusterTerm, found: ClusterJob) -> JobTaskPage:
    """Pre-tasks, then post-tasks, in their order."""
    runs = term.state.task_runs.get(found.job, {})

    def view(name: str, task: JobTask) -> JobTaskView:
        run = run_of(found, runs, name)
        given = task.model_dump(include=set(JobTaskView.model_fields))
        ran = run.model_dump(include=set(JobTaskView.model_fields))
        return JobTaskView(**given | ran, member_id=run.member)

    return JobTaskPage(job_tasks=tuple(view(*item) for item in found.spec.named_tasks.items()))


async def led(term: ClusterTerm, master: Master, found: ClusterJob, leader: MasterView) -> JobView:
    """Of a job that is led now. Trainers are desired as many as the schedule gives it."""
    stalled = await master.term.stall.look(master.job, master.metrics.records)
    view = render.job(master.job, master.metrics, leader, stalled)
    members = view.members.with_fields(trainers_desired=_held(term.state, found).trainers)
    return view.with_fields(standing=str(found.standing), members=members, version=version_of_job(found))


def resting(found: ClusterJob, state: JobState, leader: MasterView) -> JobView:
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
            trainers=0, trainers_desired=found.most_trainers, pservers=0, pservers_desired=found.pservers_wanted
        ),
        losses=state.result.losses,
        result=state.result,
        master=leader,
        spec=spec,
        standing=str(found.standing),
        version=version_of_job(found),
    )


def pool(term: ClusterTerm) -> PoolView:
    state = term.state
    wants = needed(state, clock.wall_time())

    def counts(kind: Kind) -> PoolKind:
        there = [
            (place, member, place in state.assignments) for place, member in state.members.items() if place[0] == kind
        ]
        return PoolKind(
            members=len(there),
            idle=sum(state.takes_work(place) and not (held or member.running) for place, member, held in there),
            draining=sum(not state.takes_work(place) for place, _, _ in there),
            needed=wants[kind],
        )

    return PoolView(trainers=counts("trainer"), pservers=counts("pserver"))


def pool_members(term: ClusterTerm, page_size: int, page_token: str) -> PoolMemberPage:
    """In the order of their kinds and names."""
    places = sorted(term.state.members.keys() | term.state.drains.keys())
    page, token = page_of(places, offset_of(page_token), page_size)
    return PoolMemberPage(members=tuple(pool_member(term.state, place) for place in page), next_page_token=token)


def schedule(found: JobSchedule) -> ScheduleView:
    shown = {name: getattr(found, name) for name in ScheduleView.model_fields if name != "version"}
    return ScheduleView(**shown, version=version_of_schedule(found))


def schedules(term: ClusterTerm, page_size: int, page_token: str) -> SchedulePage:
    """In the order of their names."""
    found = [term.state.schedules[name] for name in sorted(term.state.schedules)]
    page, token = page_of(found, offset_of(page_token), page_size)
    return SchedulePage(schedules=tuple(schedule(each) for each in page), next_page_token=token)


def drained(state: ClusterState, place: Place) -> PoolMemberView:
    """As it is once it is drained."""
    return pool_member(state, place, takes_work=False)


def pool_member(state: ClusterState, place: Place, *, takes_work: bool = True) -> PoolMemberView:
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
        runs = (member.running, member.epoch, member.task) == (assignment.job, assignment.epoch, assignment.task)
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
    """`present`: the names of the pool's members that have a process among the job's members; None: not known, because nobody leads
    the job now. Then a process that runs counts."""

    def there(place: Place) -> bool:
        return place[1] in present if present is not None else _runs(state.members.get(place), found)

    def count(kind: Kind) -> tuple[int, int]:
        places = state.assigned_to(found.job, kind)
        return len(places), sum(map(there, places))

    (trainers, trainers_running), (pservers, pservers_running) = count("trainer"), count("pserver")
    return MembersHeld(
        trainers=trainers, trainers_running=trainers_running, pservers=pservers, pservers_running=pservers_running
    )


def _runs(member: PoolMember | None, job: ClusterJob) -> bool:
    return member is not None and (member.running, member.epoch) == (job.job, job.epoch)
