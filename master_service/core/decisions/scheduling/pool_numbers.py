"""A resize of a job of a cluster: the pool follows the numbers of members that the job has now.

createResize -> the job's spec has other numbers -> ClusterJob has them, too -> the schedule gives places, or takes them
"""

from __future__ import annotations

from collections.abc import Collection

from master_service.core.changes import Decision, Event, Fields
from master_service.core.state.cluster import ClusterDecision, ClusterState, DropAssignment, PutJob
from shared.records import JobSpec
from shared.records.cluster import in_words


def follow_resize(
    state: ClusterState, name: str, live: JobSpec, pservers: int, holders: Collection[str], *, asked: bool
) -> ClusterDecision[bool]:
    """`live`: the job's spec as its leader has it. `pservers`: how many the job needs now; those that a resize takes away count until
    their slots have moved, so that one that dies before is replaced. `asked`: a resize asked for its number of trainers, which may be the first one.
    `holders`: the members of the pool whose parameter server has an index. Places of parameter servers that have none are taken back
    once there are more than wanted. Answers whether anything changes."""
    job = state.jobs.get(name)
    if job is None or job.standing.final:
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
