"""Schedules of a cluster: jobs that begin at the times of a cron expression. Decisions only.

time reached ─► the job before has ended ─► its job is created, and `next_time` moves on, in one transaction
             └► it has not ─► forbid: this time is left out
                           └► replace: that job is cancelled, this one is created
If times passed while no leader lived, the latest one runs, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from master_service.core.changes import Decision, Event
from master_service.core.decisions.cluster_jobs import cancel, check_scheduling, create, drop_unused
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropSchedule,
    PutSchedule,
    PutSource,
)
from trireme_shared.protocol.cron import latest_time, next_time
from trireme_shared.protocol.errors import CallerError, Conflict, InvalidArgument
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule, Source
from trireme_shared.protocol.times import compact, instant, rfc3339

MAX_SCHEDULES = 1000
LOOK_AGAIN_S = 600.0  # after an expression whose times could not be computed
NAME_CHARACTERS = 50  # with the time behind it a name of a job must not be longer than 63


@dataclass(frozen=True, slots=True)
class ScheduleLook:
    """`again`: there may be more to do at once. `next_look_s`: until the next time of any schedule; None:
    there is none."""

    again: bool
    next_look_s: float | None


def create_schedule(
    state: ClusterState, asked: JobSchedule, source: Source | None, wall_time: float
) -> ClusterDecision[JobSchedule]:
    """`asked`: without times; `wall_time`: seconds since 1970. Raises InvalidArgument, Conflict."""
    _check_schedule(state, asked)
    try:
        first = next_time(asked.cron, asked.time_zone, wall_time)
    except ValueError as error:
        raise InvalidArgument(str(error), cron=asked.cron, time_zone=asked.time_zone) from error
    made = asked.with_fields(
        create_time=rfc3339(wall_time),
        next_time=rfc3339(first),
        last_time="",
        last_job="",
        reason="",
    )
    stored: tuple[ClusterChange, ...] = (PutSource(source.digest, source),) if source is not None else ()
    message = f"schedule {made.name} ({made.cron}, {made.time_zone}) runs first at {made.next_time}"
    return Decision(made, (*stored, PutSchedule(made)), (_schedule_event("schedule_created", message, made),))


def delete_schedule(state: ClusterState, name: str) -> ClusterDecision[JobSchedule]:
    """Its jobs stay. Raises NotFound."""
    found = state.schedule(name)
    drops: tuple[ClusterChange, ...] = (DropSchedule(name), *drop_unused(state, found.source_digest))
    return Decision(
        found, drops, (_schedule_event("schedule_deleted", f"schedule {name} was deleted", found),)
    )


def run_due_schedule(state: ClusterState, wall_time: float) -> ClusterDecision[ScheduleLook]:
    """What the schedule whose time has come first does now. One at a time, so that each transaction is
    small."""
    waits = [(instant(found.next_time), found.name) for found in state.schedules.values()]
    if not waits:
        return Decision(ScheduleLook(again=False, next_look_s=None))
    time, name = min(waits)
    if time > wall_time:
        return Decision(ScheduleLook(again=False, next_look_s=time - wall_time))
    return _run(state, state.schedules[name], time, wall_time)


def skip_due_schedule(state: ClusterState, wall_time: float, cause: str) -> ClusterDecision[ScheduleLook]:
    """The schedule whose time has come first creates no job, because of `cause`, and waits for its next
    time."""
    found = min(state.schedules.values(), key=lambda each: (instant(each.next_time), each.name))
    return _failed(found, next_time(found.cron, found.time_zone, wall_time), f"no job was created: {cause}")


def _failed(found: JobSchedule, following: float, reason: str) -> ClusterDecision[ScheduleLook]:
    moved = found.with_fields(next_time=rfc3339(following), reason=reason)
    event = _schedule_event("schedule_failed", f"schedule {found.name}: {reason}", found)
    return Decision(ScheduleLook(again=True, next_look_s=0.0), (PutSchedule(moved),), (event,))


def _run(
    state: ClusterState, found: JobSchedule, time: float, wall_time: float
) -> ClusterDecision[ScheduleLook]:
    """`time`: the first one that is not decided yet. It is taken itself if the expression does not name it
    any more: the rules of time zones change."""
    again = ScheduleLook(again=True, next_look_s=0.0)
    try:
        latest = max(time, latest_time(found.cron, found.time_zone, wall_time))
        following = next_time(found.cron, found.time_zone, wall_time)
    except ValueError as error:  # a time zone that this host does not know
        return _failed(found, wall_time + LOOK_AGAIN_S, str(error))
    ran = found.with_fields(next_time=rfc3339(following), last_time=rfc3339(latest))
    stamp = rfc3339(wall_time)
    job = _job_of(found, latest)
    before = state.jobs.get(found.last_job)
    busy = before is not None and not before.standing.final
    if before is not None and busy and found.concurrency == "forbid":
        reason = (
            f"left out at {rfc3339(latest)}: job {before.job} of the time before is still {before.standing}"
        )
        moved = ran.with_fields(reason=reason)
        event = _schedule_event("schedule_skipped", f"schedule {found.name}: {reason}", found)
        return Decision(again, (PutSchedule(moved),), (event,))
    try:
        created = create(state, job, None, stamp)
    except CallerError as error:
        return _failed(ran, following, f"job {job.job} could not be created: {error.message}")
    missed = " (times before it were missed)" if latest > time else ""
    reason = f"created job {job.job} for {rfc3339(latest)}{missed}"
    changes, events = created.changes, created.events
    if before is not None and busy:
        cancelled = cancel(state, before.job, stamp)
        changes, events = changes + cancelled.changes, events + cancelled.events
    moved = ran.with_fields(last_job=job.job, reason=reason)
    events += (_schedule_event("schedule_ran", f"schedule {found.name} {reason}", found),)
    return Decision(again, (*changes, PutSchedule(moved)), events)


def _job_of(found: JobSchedule, time: float) -> ClusterJob:
    name = f"{found.name}-{compact(time)}"
    storage = f"{found.spec.storage.rstrip('/')}/{name}"
    return ClusterJob(
        job=name,
        spec=found.spec.with_fields(job=name, storage=storage),
        scheduling=found.scheduling,
        source_digest=found.source_digest,
    )


def _check_schedule(state: ClusterState, asked: JobSchedule) -> None:
    if asked.name in state.schedules or asked.name in state.unreadable_schedules:
        hint = f"`trireme schedules delete {asked.name}` frees the name"
        raise Conflict(f"schedule {asked.name} exists already", hint=hint, schedule=asked.name)
    if (count := len(state.schedules) + len(state.unreadable_schedules)) >= MAX_SCHEDULES:
        raise Conflict(f"the cluster has {count} schedules, at most {MAX_SCHEDULES} are taken")
    if len(asked.name) > NAME_CHARACTERS:
        msg = (
            f"the schedule's name has {len(asked.name)} characters, at most {NAME_CHARACTERS}: its "
            "jobs get the time behind it"
        )
        raise InvalidArgument(msg, schedule=asked.name)
    for field in ("after", "not_before_time"):
        if value := getattr(asked.scheduling, field):
            msg = f"jobs of a schedule start at its times: {field} {value} cannot be given"
            raise InvalidArgument(msg, hint=f"leave {field} out", schedule=asked.name)
    check_scheduling(asked.spec, asked.scheduling)


def _schedule_event(name: str, message: str, found: JobSchedule) -> Event:
    return Event(name, message, {"schedule": found.name})
