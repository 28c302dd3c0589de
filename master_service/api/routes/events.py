"""What happened to a job or to the cluster: logs that outlive the master. Who follows one by its cursor misses no event and sees none
twice."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from master_service.api.event_source import ClusterEvents, JobEvents
from master_service.api.resources import EventPage
from master_service.api.routes.dependencies import JobsOf, PageSize, answered
from master_service.api.routes.jobs import ClusterOf

router = APIRouter(tags=["events"])
of_cluster = APIRouter(tags=["events"])

After = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="next_after of the page before; 0: from the oldest that is kept")
]
Wait = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for an event")]


@router.get("/events", operation_id="listEvents")
async def list_events(
    jobs: JobsOf, request: Request, after: After = 0, wait_s: Wait = 0.0, page_size: PageSize = 100
) -> EventPage:
    """Events with an id above `after`, the oldest first. The log is bounded: a cursor whose next event is forgotten gets CURSOR_EXPIRED
    (410), with the ids of the oldest and the newest event that are kept."""
    source = JobEvents(jobs, request.path_params.get("job"))
    return await answered(source.page(after, page_size, wait_s), wait_s)


@of_cluster.get("/v1/cluster/events", operation_id="listClusterEvents")
async def list_cluster_events(
    cluster: ClusterOf, after: After = 0, wait_s: Wait = 0.0, page_size: PageSize = 100
) -> EventPage:
    """What happened to jobs, members and schedules; the events of one job are its own. Else as listEvents."""
    return await ClusterEvents(cluster).page(after, page_size, wait_s)
