"""Which jobs of a cluster are to be deleted: their retention is over, or their deletion was begun."""

from __future__ import annotations

from master_service.core.state.cluster import ClusterState
from master_service.core.state.job_tasks import unfinished
from shared.records.cluster import ClusterJob
from shared.times import instant


def due(state: ClusterState, wall_time: float, retention_s: float | None) -> list[str]:
    """Longest ended first. `wall_time`: seconds since 1970; `retention_s`: None: for ever. A job that another one waits for stays, and
    so does one with post-tasks that are not over."""
    waited_for = {
        name
        for job in state.jobs.values()
        if job.epoch == 0 and not job.standing.final
        for name in job.scheduling.after
    }

    def is_due(job: ClusterJob) -> bool:
        if not job.standing.final or job.wanted == "delete":
            return job.standing.final
        if retention_s is None or not job.end_time or instant(job.end_time) + retention_s > wall_time:
            return False
        return job.job not in waited_for and not unfinished(job, state.task_runs.get(job.job, {}))

    return [job.job for job in sorted(state.jobs.values(), key=lambda job: (job.end_time, job.job)) if is_due(job)]
