"""The life of a cluster's jobs: what their users ask for (create, pause, resume, cancel, delete), what
becomes of a job whose term has ended, when it is forgotten, and the places that it has after a resize;
members that users drain. Decisions only.

QUEUED and PAUSED jobs change at once. An ACTIVE job is asked (`wanted`): its leader stops it with a
checkpoint first and then writes where it is (`finish`). Asking again for what is so already changes nothing.

createResize -> the job's spec has other numbers -> `follow_resize`: ClusterJob has them, too
    -> the schedule gives places, or takes them
drain ─► its assignment goes with the next schedule ─► its process leaves in order ─► drained
undrain ─► idle
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from master_service.core.changes import Decision, Event, Fields
from master_service.core.decisions import job_operations
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropAssignment,
    DropDrain,
    DropJob,
    DropSource,
    Place,
    PutDrain,
    PutJob,
    PutSource,
    PutTaskRun,
    run_of,
    unfinished_tasks,
)
from trireme_shared.protocol.errors import Conflict, InvalidArgument
from trireme_shared.protocol.records.cluster import (
    ClusterJob,
    Drain,
    Outcome,
    Scheduling,
    Source,
    Standing,
    TaskState,
    Wanted,
    in_words,
    spoken,
)
from trireme_shared.protocol.records.job_choices import Mode
from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.times import instant

MAX_OPEN = 1000  # jobs that are not final
MAX_JOBS = 10_000  # final ones, too: the one that ended first is forgotten for another one
EVENTS = {
    Standing.COMPLETED: "job_completed",
    Standing.FAILED: "job_failed",
    Standing.PAUSED: "job_paused",
    Standing.QUEUED: "job_queued",
    Standing.CANCELLED: "job_cancelled",
}
# by what was asked for last
STOPPED = {"run": Standing.QUEUED, "pause": Standing.PAUSED, "cancel": Standing.CANCELLED}


def create(
    state: ClusterState, asked: ClusterJob, source: Source | None, stamp: str
) -> ClusterDecision[ClusterJob]:
    """Answers the new job. `asked`: with spec, scheduling and source_digest. Raises InvalidArgument,
    Conflict."""
    _check_name(state, asked.job)
    _check_open(state.jobs)
    check_scheduling(asked.spec, asked.scheduling)
    _check_after(state.jobs, asked)
    job = ClusterJob(
        job=asked.job,
        spec=asked.spec,
        scheduling=asked.scheduling,
        source_digest=asked.source_digest,
        number=1 + max((job.number for job in state.jobs.values()), default=0),
        reason="was just submitted",
        create_time=stamp,
    )
    decision = _change(
        job, "job_created", f"job {job.job} was submitted with priority {job.scheduling.priority}"
    )
    stored = (PutSource(source.digest, source),) if source is not None else ()
    room = _room_for(state, asked)
    return replace(
        decision,
        changes=(*room.changes, *stored, *decision.changes),
        events=(*room.events, *decision.events),
    )


def pause(state: ClusterState, name: str) -> ClusterDecision[ClusterJob]:
    """Raises NotFound, Conflict."""
    job = state.job(name)
    match job.standing:
        case Standing.PAUSED:
            return Decision(job)
        case Standing.QUEUED:
            return _change(_moved(job, Standing.PAUSED, "paused by its user", wanted="pause"), "job_paused")
        case Standing.ACTIVE:
            if job.wanted == "cancel":
                raise Conflict(f"job {name} is being cancelled: it cannot be paused", job=name)
            return _wanted(job, "pause", "job_pause_asked")
        case Standing.COMPLETED | Standing.FAILED | Standing.CANCELLED | Standing.UNREADABLE:
            raise _ended(job, "paused")


def resume(state: ClusterState, name: str) -> ClusterDecision[ClusterJob]:
    """An ACTIVE job whose pause is not done yet goes on, or is QUEUED as soon as it is. A FAILED one is
    QUEUED, too: whoever asks has opened it again. Raises NotFound, Conflict."""
    job = state.job(name)
    if job.wanted == "delete":
        raise Conflict(f"job {name} is being deleted: it cannot be resumed", job=name)
    match job.standing:
        case Standing.PAUSED | Standing.FAILED:
            resumed = _moved(job, Standing.QUEUED, "resumed by its user", wanted="run")
            decision = _change(resumed.with_fields(end_time=""), "job_resumed")
            return replace(decision, changes=decision.changes + _tasks_again(state, job))
        case Standing.QUEUED:
            return Decision(job)
        case Standing.ACTIVE:
            if job.wanted == "cancel":
                raise Conflict(f"job {name} is being cancelled: it cannot be resumed", job=name)
            return _wanted(job, "run", "job_resumed")
        case Standing.COMPLETED | Standing.CANCELLED | Standing.UNREADABLE:
            raise _ended(job, "resumed")


def cancel(state: ClusterState, name: str, stamp: str) -> ClusterDecision[ClusterJob]:
    """Of a job that has ended: the post-tasks that are not over. Raises NotFound, Conflict."""
    job = state.job(name)
    if job.standing.final and (names := unfinished_tasks(job, state.task_runs.get(name, {}))):
        return _cancel_tasks(state, job, names, stamp)
    match job.standing:
        case Standing.CANCELLED:
            return Decision(job)
        case Standing.QUEUED | Standing.PAUSED:
            ended = _moved(job, Standing.CANCELLED, "cancelled by its user", wanted="cancel")
            return _change(ended.with_fields(end_time=stamp), "job_cancelled")
        case Standing.ACTIVE:
            return _wanted(job, "cancel", "job_cancel_asked")
        case Standing.COMPLETED | Standing.FAILED | Standing.UNREADABLE:
            raise _ended(job, "cancelled")


def begin_delete(state: ClusterState, name: str) -> ClusterDecision[ClusterJob]:
    """From now on the job is not resumed, and no job may come after it: its files are deleted. Raises
    NotFound, Conflict."""
    job = state.job(name)
    if job.wanted == "delete" or job.standing is Standing.UNREADABLE:  # nothing is written of such a job
        return Decision(job)
    if not job.standing.final:
        msg = (
            f"job {name} is {job.standing}: only jobs that are COMPLETED, FAILED or CANCELLED can be deleted"
        )
        raise Conflict(msg, hint=f"`trireme cancel {name}` first", job=name, standing=str(job.standing))
    if names := unfinished_tasks(job, state.task_runs.get(name, {})):
        msg = f"job {name} is {job.standing}, and its {spoken(names[0])} is not over"
        raise Conflict(msg, hint=f"wait for it, or stop it with `trireme cancel {name}`", job=name)
    waiting = [other.job for other in state.jobs.values() if _waits_for(other, name)]
    if waiting and job.standing is Standing.COMPLETED:
        msg = f"job {waiting[0]} comes after job {name} and has not started yet"
        raise Conflict(
            msg, hint="delete it once that one has started, or cancel that one", job=name, after=waiting[:20]
        )
    return _change(job.with_fields(wanted="delete"), "job_delete_asked", f"job {name} is being deleted")


def delete(
    state: ClusterState, name: str, stamp: str, *, has_keys: bool = True
) -> ClusterDecision[ClusterJob]:
    """Answers the job that is no more; its script goes with the last job that has it. Call it after
    `begin_delete`, once the files are gone. `has_keys`: as in DropJob. Raises NotFound; Conflict: its
    deletion was not begun."""
    job = state.job(name)
    if job.wanted != "delete" and job.standing is not Standing.UNREADABLE:
        raise Conflict(f"the deletion of job {name} was not begun", job=name)
    done = job_operations.deleted(state, name, stamp)
    dropped = drop_unused(state, job.source_digest)
    drops: tuple[ClusterChange, ...] = (DropJob(name, has_keys), *dropped, *done)
    return Decision(job, drops, (Event("job_deleted", f"job {name} was deleted", {"job": name}),))


def drop_unused(state: ClusterState, digest: str) -> tuple[DropSource, ...]:
    """A job or schedule with this script is about to go: the script, too, if nothing else runs it."""
    return (DropSource(digest),) if digest and state.uses_source(digest) <= 1 else ()


def _check_name(state: ClusterState, name: str) -> None:
    known = state.jobs.get(name)
    if known is not None:
        longer = f"; to train it longer, choose another name and --init-from {name}"
        way = (
            f"`trireme delete {name}` frees the name{longer}"
            if known.standing.final
            else f"`trireme delete {name}` frees the name"
            if known.standing is Standing.UNREADABLE
            else "choose another name"
        )
        raise Conflict(f"job {name} exists already; it is {known.standing}", hint=way, job=name)


def _check_open(jobs: Mapping[str, ClusterJob]) -> None:
    # PAUSED ones too: each of them may be resumed
    still = sum(not job.standing.final for job in jobs.values())
    if still >= MAX_OPEN:
        msg = f"{still} jobs of the cluster have not ended, at most {MAX_OPEN} are taken"
        raise Conflict(msg, hint="wait for one of them, or cancel one")


def _room_for(state: ClusterState, asked: ClusterJob) -> ClusterDecision[None]:
    """The cluster forgets the job that ended first, if it keeps as many as it may: its keys go, its files
    stay. Raises Conflict: none of those that have ended may go."""
    if len(state.jobs) < MAX_JOBS:
        return Decision(None)
    if not (ended := _may_go(state)):
        msg = f"the cluster keeps {len(state.jobs)} jobs, at most {MAX_JOBS}, and needs each of them"
        raise Conflict(msg, hint="wait for jobs that others come after, or for post-tasks")
    oldest = min(ended, key=_ended_first)
    script = () if oldest.source_digest == asked.source_digest else drop_unused(state, oldest.source_digest)
    message = (
        f"job {oldest.job}, {oldest.standing} since {oldest.end_time}, is forgotten for job {asked.job}: "
        f"the cluster keeps {MAX_JOBS} jobs. Its files stay in {oldest.spec.storage}"
    )
    event = Event("job_forgotten", message, {"job": oldest.job})
    return Decision(None, (DropJob(oldest.job), *script), (event,))


def _may_go(state: ClusterState) -> list[ClusterJob]:
    """Jobs that have ended, without those that another one waits for, that have post-tasks which are not
    over, or whose deletion was begun."""
    waited_for = {
        name
        for job in state.jobs.values()
        if job.epoch == 0 and not job.standing.final
        for name in job.scheduling.after
    }
    return [
        job
        for job in state.jobs.values()
        if job.standing.final and job.wanted != "delete" and job.job not in waited_for
        if not unfinished_tasks(job, state.task_runs.get(job.job, {}))
    ]


def _ended_first(job: ClusterJob) -> tuple[str, str]:
    return job.end_time, job.job


def check_scheduling(spec: JobSpec, scheduling: Scheduling) -> None:
    """Raises InvalidArgument."""
    least, lanes = scheduling.min_trainers, spec.lanes
    if spec.mode is Mode.SYNC and least > lanes:
        msg = (
            f"min_trainers {least} is more than lanes {lanes}: a synchronous job has work for {lanes} "
            "trainers at most"
        )
        raise InvalidArgument(msg, hint="raise lanes or lower min_trainers", min_trainers=least, lanes=lanes)
    most = min(lanes, scheduling.max_trainers or lanes)
    if spec.min_members > most:
        msg = (
            f"min_members {spec.min_members} is more than the {most} trainers that the job gets at "
            "most (lanes, max_trainers)"
        )
        raise InvalidArgument(
            msg, hint="lower min_members, or raise the others", min_members=spec.min_members
        )


def _check_after(jobs: Mapping[str, ClusterJob], asked: ClusterJob) -> None:
    for name in asked.scheduling.after:
        before = jobs.get(name)
        if name == asked.job:
            raise InvalidArgument(f"job {name} cannot come after itself", job=name)
        if before is None or before.wanted == "delete":
            raise InvalidArgument(
                f"job {asked.job} comes after job {name}, which does not exist",
                hint="submit that one first",
                after=name,
            )
        if before.standing in {Standing.FAILED, Standing.CANCELLED}:
            msg = (
                f"job {asked.job} comes after job {name}, which is {before.standing} and will never be "
                "COMPLETED"
            )
            raise InvalidArgument(msg, after=name)
    if circle := _circle(jobs, asked):
        raise InvalidArgument(f"jobs would wait for each other: {' after '.join(circle)}", circle=circle)


def _circle(jobs: Mapping[str, ClusterJob], asked: ClusterJob) -> list[str]:
    """The way from the new job back to itself, by what each comes after; empty: there is none. Jobs may name
    one that was deleted, and whose name is taken again now."""
    came_from: dict[str, str] = {}
    todo = [asked.job]
    while todo:
        name = todo.pop()
        job = asked if name == asked.job else jobs.get(name)
        for before in job.scheduling.after if job else ():
            if before == asked.job:
                way = [name]
                while way[-1] != asked.job:
                    way.append(came_from[way[-1]])
                return [*reversed(way), asked.job]
            if before not in came_from:
                came_from[before] = name
                todo.append(before)
    return []


def _waits_for(job: ClusterJob, name: str) -> bool:
    return job.epoch == 0 and not job.standing.final and name in job.scheduling.after


def _cancel_tasks(
    state: ClusterState, job: ClusterJob, names: list[str], stamp: str
) -> ClusterDecision[ClusterJob]:
    runs = state.task_runs.get(job.job, {})
    asked = [run_of(job, runs, name) for name in names]
    changes = tuple(
        PutTaskRun(run.with_fields(state=TaskState.CANCELLED, reason="cancelled by its user", end_time=stamp))
        for run in asked
    )
    message = f"{len(names)} tasks of job {job.job} are cancelled"
    return Decision(job, changes, (Event("job_tasks_cancelled", message, {"job": job.job}),))


def _tasks_again(state: ClusterState, job: ClusterJob) -> tuple[PutTaskRun, ...]:
    """A job that FAILED is tried again: failed pre-tasks, too, and all post-tasks once more after its next
    end."""
    if job.standing is not Standing.FAILED:
        return ()
    return tuple(
        PutTaskRun(run.with_fields(state=TaskState.WAITING, failures=0, lost=0, reason=""))
        for run in state.task_runs.get(job.job, {}).values()
        if run.state.over and (run.name.startswith("post-") or run.state is not TaskState.SUCCEEDED)
    )


def _moved(job: ClusterJob, standing: Standing, reason: str, *, wanted: Wanted) -> ClusterJob:
    return job.with_fields(standing=standing, reason=reason, wanted=wanted)


def _wanted(job: ClusterJob, wanted: Wanted, event: str) -> ClusterDecision[ClusterJob]:
    if job.wanted == wanted:
        return Decision(job)
    return _change(job.with_fields(wanted=wanted), event, f"job {job.job} is asked to {wanted}")


def _ended(job: ClusterJob, what: str) -> Conflict:
    why = f"{job.reason}; it" if job.standing is Standing.UNREADABLE else "it"
    return Conflict(
        f"job {job.job} is {job.standing}: {why} cannot be {what} any more",
        job=job.job,
        standing=str(job.standing),
    )


def _change(job: ClusterJob, event: str, message: str = "") -> ClusterDecision[ClusterJob]:
    message = message or f"job {job.job} is {job.standing}: {job.reason}"
    return Decision(job, (PutJob(job),), (Event(event, message, {"job": job.job}),))


def finish(
    state: ClusterState,
    name: str,
    standing: Standing,
    reason: str,
    stamp: str,
    outcome: Outcome | None = None,
) -> ClusterDecision[None]:
    """Done, failed, or left as its users or the schedule wanted. `standing`: where it is now. `outcome`: how
    far it was; None: as far as before. Nothing changes if the job is not ACTIVE any more: another term has
    done it."""
    job = state.jobs.get(name)
    if job is None or job.standing is not Standing.ACTIVE:
        return Decision(None)
    if (
        standing in (Standing.PAUSED, Standing.QUEUED) and standing is not STOPPED[job.wanted]
    ):  # asked for while it stopped
        standing, reason = STOPPED[job.wanted], f"asked to {job.wanted} while it stopped"
    ended = stamp if standing.final else ""
    left = job.with_fields(
        standing=standing,
        reason=reason,
        end_time=ended,
        preempted_by="",
        outcome=job.outcome if outcome is None else outcome,
    )
    fields: Fields = {"job": name, "epoch": job.epoch}
    event = Event(EVENTS[standing], f"job {name} is {standing}: {reason}", fields)
    return Decision(None, (PutJob(left), *job_operations.stopped(state, left, stamp)), (event,))


def fail(state: ClusterState, name: str, reason: str, stamp: str) -> ClusterDecision[None]:
    """Whatever it was about: nothing more can be written about it. Nothing changes if it has ended."""
    job = state.jobs.get(name)
    if job is None or job.standing.final:
        return Decision(None)
    failed = _moved(job, Standing.FAILED, reason, wanted="run").with_fields(end_time=stamp, preempted_by="")
    told = _change(failed, "job_failed")
    return Decision(None, (*told.changes, *job_operations.stopped(state, failed, stamp)), told.events)


def due_for_deletion(state: ClusterState, wall_time: float, retention_s: float | None) -> list[str]:
    """Names of jobs whose retention is over, or whose deletion was begun; longest ended first. `wall_time`:
    seconds since 1970; `retention_s`: how long a job is kept after its end, None: for ever. A job that
    another one waits for stays, and so does one with post-tasks that are not over."""
    due = [
        job
        for job in state.jobs.values()
        if (job.standing.final and job.wanted == "delete") or _is_deleting_unread(state, job)
    ]
    if retention_s is not None:
        due += [
            job for job in _may_go(state) if job.end_time and instant(job.end_time) + retention_s <= wall_time
        ]
    return [job.job for job in sorted(due, key=_ended_first)]


def _is_deleting_unread(state: ClusterState, job: ClusterJob) -> bool:
    """Its record does not say it. A record that can be read does, whoever carries an operation out: one of
    that name may be of the job before."""
    return job.standing is Standing.UNREADABLE and job_operations.is_deleting(state, job.job)


def follow_resize(
    state: ClusterState, name: str, live: JobSpec, pservers: int, holders: Collection[str], *, asked: bool
) -> ClusterDecision[bool]:
    """The pool follows the numbers of members that the job has now. `live`: the job's spec as its leader has
    it. `pservers`: how many the job needs now; those that a resize takes away count until their slots have
    moved, so that one that dies before is replaced. `asked`: a resize asked for its number of trainers, which
    may be the first one. `holders`: the members of the pool whose parameter server has an index. Places of
    parameter servers that have none are taken back once there are more than wanted. Answers whether anything
    changes."""
    job = state.jobs.get(name)
    if job is None or job.standing is not Standing.ACTIVE:
        return Decision(False)
    resized, fields = job, Fields(job=name)
    if pservers != job.pservers_wanted:
        resized, fields["pservers"] = resized.with_fields(pservers=pservers), pservers
    # without a resize in force the job may have more than its spec says: also after one that was cancelled
    trainers = live.trainers if asked or live.trainers != job.spec.trainers else None
    if trainers != job.trainers:
        resized = resized.with_fields(trainers=trainers)
        fields |= {"trainers": trainers} if trainers is not None else {}
    if resized is not job:
        count = "any number of trainers" if trainers is None else in_words("trainer", trainers)
        servers = f" and {in_words('pserver', pservers)}" if pservers else ""
        message = f"job {name} has places for {count}{servers} now"
        return Decision(True, (PutJob(resized),), (Event("job_resized", message, fields),))
    places = state.assigned_to(name, "pserver")
    surplus = len(places) - job.pservers_wanted
    without = [place for place in places if place[1] not in holders]
    if surplus <= 0 or not without or len(places) - len(without) < job.pservers_wanted:
        return Decision(False)
    drops = tuple(DropAssignment(place) for place in without[:surplus])
    event = Event("places_freed", f"job {name} gives {in_words('pserver', len(drops))} back", {"job": name})
    return Decision(True, drops, (event,))


MAX_DRAINS = 10_000  # of places that may have no member any more


def drain(state: ClusterState, member: str, stamp: str) -> ClusterDecision[Place]:
    """Draining it again changes nothing. Raises NotFound, Conflict."""
    place = state.place(member)
    if place in state.drains:
        return Decision(place)
    if len(state.drains) >= MAX_DRAINS:
        msg = f"{len(state.drains)} members are drained, at most {MAX_DRAINS} are kept"
        raise Conflict(msg, hint="`trireme pool undrain` those that are gone for good")
    held = state.assignments.get(place)
    leaves = f": it leaves job {held.job}" if held else ""
    event = Event("member_drained", f"{place[0]} {member} is drained{leaves}", {"member": member})
    return Decision(place, (PutDrain(place, Drain(ask_time=stamp)),), (event,))


def undrain(state: ClusterState, member: str) -> ClusterDecision[Place]:
    """Also of a member that is gone. Raises NotFound."""
    place = state.place(member)
    if place not in state.drains:
        return Decision(place)
    event = Event("member_undrained", f"{place[0]} {member} may get work again", {"member": member})
    return Decision(place, (DropDrain(place),), (event,))
