"""Where metrics and evaluations come from: the term of a job that is led here, or what is stored of one that nobody leads now."""

from __future__ import annotations

from collections.abc import Sequence

from master_service.api.metrics.render import KeptMetrics
from master_service.api.routes.dependencies import answered, committed
from master_service.cluster.leader import ClusterMaster
from master_service.core.decisions.evaluations.evaluation import in_force
from master_service.leadership.jobs_led import JobsLed
from master_service.leadership.master import Master
from shared.errors import Conflict
from shared.evaluations import Evaluation


def find_led(jobs: JobsLed, job: str | None) -> Master | None:
    """None: nobody leads that job of the cluster now. Raises NotFound, NotLeader, NotReady; Conflict if `job` is None and there are
    several."""
    try:
        return jobs.find(job)
    except Conflict:
        if not isinstance(jobs, ClusterMaster) or job is None:
            raise
        return None


async def metrics_of(jobs: JobsLed, job: str | None) -> KeptMetrics:
    """Raises StorageUnreachable as well, and TooManyRequests, DeadlineExceeded."""
    if (master := find_led(jobs, job)) is not None:
        term = master.term
        series = term.series
        return KeptMetrics(series.table, series.epochs, series.known, term.job.state.timeline, master.metrics.step)
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    stored = await jobs.series_of(job)
    return KeptMetrics(stored.table, stored.steps.epochs, stored.steps.next)


async def evaluations_of(jobs: JobsLed, job: str | None) -> Sequence[Evaluation]:
    """In the order of their numbers. Raises PeerError as well."""
    if (master := find_led(jobs, job)) is not None:
        return await committed(master, lambda: in_force(master.job))
    assert isinstance(jobs, ClusterMaster)
    assert job is not None
    return await answered(jobs.evaluations_of(job))
