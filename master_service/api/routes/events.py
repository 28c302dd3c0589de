"""What happened to a job or to the cluster: logs that outlive the master. Who follows one by its cursor
misses no event and sees none twice."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Header, Query, Request

from master_service.api import render
from master_service.api.routes.dependencies import JobsOf, PageSize, answered, find_led
from master_service.api.routes.jobs import ClusterOf
from master_service.api.server_sent import Messages, ServerSent
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.leadership.master import Master
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.rest import EventPage

router = APIRouter(tags=["events"])
of_cluster = APIRouter(tags=["events"])

After = Annotated[
    int,
    Query(ge=0, le=2**63 - 1, description="next_after of the page before; 0: from the oldest that is kept"),
]
LastEventId = Annotated[str | None, Header(max_length=20, pattern="^[0-9]+$")]  # what an EventSource saw last
PAGE = 100
Wait = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for an event")]
# beside the document, which cannot describe a stream: its paths, and their parameters
STREAMS = dict.fromkeys(("/v1/jobs/{job}/events/stream", "/v1/cluster/events/stream"), frozenset({"after"}))
LOOK_S = 1.0  # how often the log of a job that nobody leads is read while somebody waits


@router.get("/events", operation_id="listEvents")
async def list_events(
    jobs: JobsOf, request: Request, after: After = 0, wait_s: Wait = 0.0, page_size: PageSize = 100
) -> EventPage:
    """Events with an id above `after`, the oldest first. The log is bounded: a cursor whose next event is
    forgotten gets CURSOR_EXPIRED (410), with the ids of the oldest and the newest event that are kept."""
    source = JobEvents(jobs, request.path_params.get("job"))
    return await answered(source.page(after, page_size, wait_s), wait_s)


@of_cluster.get("/v1/cluster/events", operation_id="listClusterEvents")
async def list_cluster_events(
    cluster: ClusterOf, after: After = 0, wait_s: Wait = 0.0, page_size: PageSize = 100
) -> EventPage:
    """What happened to jobs, members and schedules; the events of one job are its own. Else as listEvents."""
    return await ClusterEvents(cluster).page(after, page_size, wait_s)


@router.get("/events/stream", include_in_schema=False)
async def stream_events(
    jobs: JobsOf, request: Request, after: After = 0, last_event_id: LastEventId = None
) -> ServerSent:
    """As listEvents, as server-sent events."""
    return await _stream(JobEvents(jobs, request.path_params.get("job")), request, after, last_event_id)


@of_cluster.get("/v1/cluster/events/stream", include_in_schema=False)
async def stream_cluster_events(
    cluster: ClusterOf, request: Request, after: After = 0, last_event_id: LastEventId = None
) -> ServerSent:
    return await _stream(ClusterEvents(cluster), request, after, last_event_id)


async def _stream(source: EventSource, request: Request, after: int, last_event_id: str | None) -> ServerSent:
    """Raises CursorExpired, NotLeader, TooManyRequests: these are answers, not a stream."""
    streams, cursor = request.app.state.streams, int(last_event_id) if last_event_id is not None else after
    streams.check()

    async def following(wait_s: float) -> Messages:
        nonlocal cursor
        page = await source.page(cursor, PAGE, wait_s)
        cursor = page.next_after
        return [(str(event.event_id), event.model_dump_json()) for event in page.events]

    return ServerSent(await answered(following(0.0)), following, streams)


class EventSource(Protocol):
    async def page(self, after: int, limit: int, wait_s: float) -> EventPage:
        """Events after the cursor; if there are none, those that come within `wait_s`. Raises CursorExpired,
        NotLeader, PeerError."""
        ...


class JobEvents:
    """`job` None: the only one that the process leads."""

    def __init__(self, jobs: JobsLed, job: str | None) -> None:
        self._jobs, self._job = jobs, job

    async def page(self, after: int, limit: int, wait_s: float) -> EventPage:
        """See EventSource. Raises NotFound, too."""
        deadline = clock.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline - clock.monotonic())
            if (master := find_led(self._jobs, self._job)) is not None:
                return await _led(master, after, limit, left_s)
            assert isinstance(self._jobs, ClusterMaster)
            assert self._job is not None
            page = render.events(await self._jobs.events_of(self._job), after, limit)
            if page.events or left_s <= 0:
                return page
            await self._jobs.events.next(min(left_s, LOOK_S))


async def _led(master: Master, after: int, limit: int, wait_s: float) -> EventPage:
    term = master.term
    await master.events.beyond(after, wait_s)
    page = render.events(term.job.events, after, limit)
    await term.writer.settled()
    return page


class ClusterEvents:
    def __init__(self, cluster: ClusterMaster) -> None:
        self._cluster = cluster

    async def page(self, after: int, limit: int, wait_s: float) -> EventPage:
        """See EventSource."""
        term = self._cluster.term
        await self._cluster.events.beyond(after, wait_s)
        self._cluster.check_leading()
        return render.events(term.state.events, after, limit)
