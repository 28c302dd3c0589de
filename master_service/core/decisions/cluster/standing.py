"""What becomes of a job of a cluster whose term has ended: done, failed, or left as its users or the schedule wanted."""

from __future__ import annotations

from master_service.core.changes import Decision, Event, Fields
from master_service.core.state.cluster import ClusterDecision, ClusterState, PutJob
from shared.records.cluster import Standing

EVENTS = {
    Standing.COMPLETED: "job_completed",
    Standing.FAILED: "job_failed",
    Standing.PAUSED: "job_paused",
    Standing.QUEUED: "job_queued",
    Standing.CANCELLED: "job_cancelled",
}


STOPPED = {"run": Standing.QUEUED, "pause": Standing.PAUSED, "cancel": Standing.CANCELLED}  # by what was asked for last


def finish(state: ClusterState, name: str, standing: Standing, reason: str, stamp: str) -> ClusterDecision[None]:
    """`standing`: where it is now. Nothing changes if the job is not ACTIVE any more: another term has done it."""
    job = state.jobs.get(name)
    if job is None or job.standing is not Standing.ACTIVE:
        return Decision(None)
    if (
        standing in (Standing.PAUSED, Standing.QUEUED) and standing is not STOPPED[job.wanted]
    ):  # asked for while it stopped
        standing, reason = STOPPED[job.wanted], f"asked to {job.wanted} while it stopped"
    ended = stamp if standing.final else ""
    left = job.with_fields(standing=standing, reason=reason, end_time=ended, preempted_by="")
    fields: Fields = {"job": name, "epoch": job.epoch}
    event = Event(EVENTS[standing], f"job {name} is {standing}: {reason}", fields)
    return Decision(None, (PutJob(left),), (event,))
