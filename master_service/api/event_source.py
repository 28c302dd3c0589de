"""Where events come from: the log of a job (led here, or not led now) or of the cluster. What is given is in etcd."""

from __future__ import annotations

from typing import Protocol

from master_service.api import render
from master_service.api.resources import EventPage
from master_service.cluster.leader import ClusterMaster
from master_service.leadership.jobs_led import JobsLed
from master_service.leadership.master import Master
from shared.errors import Conflict, NotReady
from shared.runtime import clock

LOOK_S = 1.0  # how often the log of a job that nobody leads is read while somebody waits


class EventSource(Protocol):
    async def page(self, after: int, limit: int, wait_s: float) -> EventPage:
        """Events after the cursor; if there are none, those that come within `wait_s`. Raises CursorExpired, NotLeader, PeerError."""
        ...


class JobEvents:
    """`job` None: the only one that the process leads."""

    def __init__(self, jobs: JobsLed, job: str | None) -> None:
        self._jobs, self._job = jobs, job

    async def page(self, after: int, limit: int, wait_s: float) -> EventPage:
        """As EventSource. Raises NotFound as well."""
        deadline = clock.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline - clock.monotonic())
            if (master := self._find()) is not None:
                return await _led(master, after, limit, left_s)
            assert isinstance(self._jobs, ClusterMaster)
            assert self._job is not None
            page = render.events(await self._jobs.events_of(self._job), after, limit)
            if page.events or left_s <= 0:
                return page
            await self._jobs.events.next(min(left_s, LOOK_S))

    def _find(self) -> Master | None:
        """None: a job of the cluster that nobody leads now, or not yet."""
        try:
            master = self._jobs.find(self._job)
        except (Conflict, NotReady):
            if not isinstance(self._jobs, ClusterMaster) or self._job is None:
                raise
            self._jobs.check_leading()
            return None
        begins = isinstance(self._jobs, ClusterMaster) and self._job is not None and master.current_term is None
        return None if begins else master


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
        """As EventSource."""
        term = self._cluster.term
        await self._cluster.events.beyond(after, wait_s)
        self._cluster.check_leading()
        return render.events(term.state.events, after, limit)
