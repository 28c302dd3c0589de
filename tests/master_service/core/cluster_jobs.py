"""Jobs, members and states of a cluster, for tests of the decisions about them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from master_service.core.decisions import cluster_jobs
from master_service.core.decisions.scheduling.schedule import Schedule, schedule
from master_service.core.state.cluster import ClusterDecision, ClusterState, Place, PutAssignment, PutJob
from tests.master_service.cluster import spec_of
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Kind,
    PoolMember,
    Scheduling,
    Standing,
)
from trireme_shared.protocol.records.job_choices import Mode
from trireme_shared.protocol.records.job_spec import JobSpec

WALL = 1_800_000_000.0
SCHEDULING = set(Scheduling.model_fields)


def job_of(
    name: str, number: int = 0, *, pservers: int = 1, spec: JobSpec | None = None, **fields: Any
) -> ClusterJob:
    """An asynchronous job (any number of trainers is of use); `fields` of Scheduling and of ClusterJob."""
    chosen = {field: fields.pop(field) for field in SCHEDULING & set(fields)}
    spec = spec or spec_of(job=name, mode=Mode.ASYNC, pservers=pservers)
    return ClusterJob(job=name, spec=spec, scheduling=Scheduling(**chosen), number=number, **fields)


def active(name: str, number: int = 0, **fields: Any) -> ClusterJob:
    return job_of(name, number, **{"standing": Standing.ACTIVE, "epoch": 1, **fields})


def member_of(kind: Kind, name: str, host: str = "", **fields: Any) -> PoolMember:
    host = host or "h1"
    return PoolMember(
        member=name, kind=kind, host=host, agent=f"agent-{host}", pid=1, incarnation=f"i-{name}", **fields
    )


def state_of(*jobs: ClusterJob, trainers: int = 0, pservers: int = 0, hosts: int = 1) -> ClusterState:
    """Idle members t0, t1, ... and p0, p1, ..., dealt out to hosts h0, h1, ... in turn."""
    state = ClusterState()
    for number, job in enumerate(jobs):
        state.apply(PutJob(job.model_copy(update={"number": job.number or number + 1})), 0.0)
    for number in range(trainers):
        state.see(("trainer", f"t{number}"), member_of("trainer", f"t{number}", f"h{number % hosts}"), 0.0)
    for number in range(pservers):
        state.see(("pserver", f"p{number}"), member_of("pserver", f"p{number}", f"h{number % hosts}"), 0.0)
    return state


def give(state: ClusterState, job: str, *names: str, at: float = -1000.0) -> None:
    """In place: the members (`t…` or `p…`) run processes of the job since long ago."""
    for name in names:
        place: Place = ("trainer" if name.startswith("t") else "pserver", name)
        member = state.members[place]
        epoch = state.jobs[job].epoch
        state.apply(
            PutAssignment(place, Assignment(job=job, epoch=epoch, incarnation=member.incarnation)), at
        )
        state.see(place, member.model_copy(update={"running": job, "epoch": epoch}), at)


def held_by(state: ClusterState, job: str) -> list[str]:
    return sorted(member for (_, member), held in state.assignments.items() if held.job == job)


def step(
    state: ClusterState, now: float = 0.0, wall_time: float = WALL, lost: tuple[Place, ...] = ()
) -> Schedule:
    """Schedule, apply, and see that a second look changes nothing."""
    made = schedule(state, now, wall_time, lost=lost)
    for change in made.changes:
        state.apply(change, now)
    assert schedule(state, now, wall_time, lost=lost).changes == ()
    return made


def preempted(state: ClusterState) -> tuple[str, ...]:
    """ACTIVE jobs that must be stopped with a checkpoint and be QUEUED again."""
    jobs = state.jobs.values()
    return tuple(sorted(job.job for job in jobs if job.standing is Standing.ACTIVE and job.preempted_by))


def run_children(state: ClusterState, now: float = 0.0) -> None:
    """What host agents do: processes of dropped assignments have ended, those of new ones run."""
    for place, member in list(state.members.items()):
        held = state.assignments.get(place)
        running = {"running": held.job, "epoch": held.epoch} if held else {"running": "", "epoch": 0}
        state.see(place, member.model_copy(update=running), now)


def settle(state: ClusterState, now: float = 0.0) -> None:
    for _ in range(10):
        changes = step(state, now).changes
        run_children(state, now)
        if not changes:
            return
    pytest.fail("the schedule does not come to rest")


def split(state: ClusterState, *jobs: str) -> list[tuple[int, int]]:
    """(trainers, parameter servers) of each, counted in one go: there may be a thousand."""
    found = Counter((held.job, kind) for (kind, _), held in state.assignments.items() if not held.task)
    return [(found[job, "trainer"], found[job, "pserver"]) for job in jobs]


def deleted(state: ClusterState, name: str) -> ClusterDecision[ClusterJob]:
    """The deletion of a job that was begun, in place."""
    for change in cluster_jobs.begin_delete(state, name).changes:
        state.apply(change, 0.0)
    return cluster_jobs.delete(state, name, "now")
