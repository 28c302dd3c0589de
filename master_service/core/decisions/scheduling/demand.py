"""How many members the jobs need, for whoever adds members to the pool."""

from __future__ import annotations

from master_service.core.decisions.scheduling.admission import KINDS
from master_service.core.decisions.scheduling.readiness import readiness
from master_service.core.state.cluster import ClusterState
from master_service.core.state.job_tasks import unfinished
from shared.records.cluster import ClusterJob, Kind, Standing


def needed(state: ClusterState, wall_time: float) -> dict[Kind, int]:
    """So that every job that may run now can start, and has what a resize asked for. What a job could use beyond its least number of
    trainers is no need. `wall_time`: seconds since 1970."""
    active = [job for job in state.jobs.values() if job.standing is Standing.ACTIVE and not job.leaving]
    jobs = [*active, *readiness(state.jobs, wall_time).ready]
    found = {kind: sum(_of(job, kind) for job in jobs) for kind in KINDS}
    ended = (job for job in state.jobs.values() if job.standing.final)
    if not found["trainer"] and any(unfinished(job, state.task_runs.get(job.job, {})) for job in ended):
        found["trainer"] = 1  # post-tasks run on trainers
    return found


def _of(job: ClusterJob, kind: Kind) -> int:
    if kind == "pserver":
        return job.pservers_wanted
    return job.least_trainers if job.trainers is None else job.most_trainers
