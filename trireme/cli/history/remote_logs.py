"""`trireme logs` of a master elsewhere: by its REST API, also through changes of the master.

listing ─► each log from its end backwards, until enough ─► shown by time ─► listing: what has grown is read on from its cursor ─► ...
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from operator import attrgetter

from trireme.cli.targets import checked_name
from trireme.client import ONLY_JOB, AsyncClient
from trireme.view.job_address import JOBS
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import Line, is_of
from trireme_shared.protocol.errors import NotFound, PeerError
from trireme_shared.protocol.rest import LogLines, LogView

LOOK_S = 1.0
LOST_S = 60.0  # how long nobody may answer for logs that are followed
PAGE = 1000
PAGES = 16  # of one log at once
NAMES = 20

_when = attrgetter("time")


class RemoteLogs:
    """The logs of a job, those that appear later too. `wanted`: the member or members whose logs are meant; "": all."""

    def __init__(self, client: AsyncClient, job: str, wanted: str) -> None:
        self._client, self._job, self._wanted = client, job, wanted
        self._cursors: dict[str, int] = {}
        self._read: dict[str, list[Line]] = {}  # and not given yet

    async def names(self, wanted: str = "") -> list[str]:
        return [view.log async for view in self._client.list_logs(self._job) if not wanted or is_of(view.log, wanted)]

    async def last(self, count: int, since: str) -> list[Line]:
        """At most `count`, none before `since`, in the order of time."""
        found = [await self._last(log, count, since) for log in await self.names(self._wanted)]
        lines = list(heapq.merge(*found, key=_when))
        return lines[-count:] if count else []

    async def news(self) -> list[Line]:
        """What was written since `last`, or since the `news` before. After an error, what was read comes with the next ones."""
        async for view in self._grown():
            await self._read_news(view.log)
        found, self._read = self._read, {}
        return list(heapq.merge(*found.values(), key=_when))

    async def _grown(self) -> AsyncIterator[LogView]:
        async for view in self._client.list_logs(self._job):
            is_meant = not self._wanted or is_of(view.log, self._wanted)
            if is_meant and view.bytes != self._cursors.get(view.log, 0):
                yield view

    async def _last(self, log: str, count: int, since: str) -> list[Line]:
        page = await self._client.get_log(self._job, log, tail=min(PAGE, max(1, count)))
        self._cursors[log] = page.next_after
        found = deque(_lines(page))
        while page.next_before and len(found) < count and not (since and found and found[0].time < since):
            left = min(PAGE, count - len(found))
            page = await self._client.get_log(self._job, log, before=page.next_before, tail=left)
            found.extendleft(reversed(_lines(page)))
        return [line for line in list(found)[-count:] if line.time >= since] if count else []

    async def _read_news(self, log: str) -> None:
        for _ in range(PAGES):
            cursor = self._cursors.get(log, 0)
            page = await self._client.get_log(self._job, log, after=cursor)
            self._read.setdefault(log, []).extend(_lines(page))
            self._cursors[log] = page.next_after
            if page.next_after == cursor:
                break


async def follow_logs(
    url: str,
    job: str | None,
    wanted: str,
    tail: int,
    since: str,
    show: Callable[[Iterable[Line]], None],
    *,
    follow: bool,
) -> None:
    """Shows the last lines, and with `follow` what comes. Raises NotFound; PeerError if nobody answers, while it follows after LOST_S."""
    root, _, named = url.partition(JOBS)
    async with AsyncClient(root) as client:
        name = checked_name(job or named.strip("/")) if job or named else (await client.get_job(ONLY_JOB)).job
        logs = RemoteLogs(client, name, wanted)
        if not await logs.names(wanted):
            there = await logs.names()
            others = ", ".join(there[:NAMES]) + (", ..." if len(there) > NAMES else "")
            msg = f"the master has no log {f'of {wanted} ' if wanted else ''}of job {name}; it has: {others or 'none'}"
            raise NotFound(msg, hint="logs of members on other hosts lie in the data folder of their host agent")
        show(await logs.last(tail, since))
        heard = clock.monotonic()
        while follow:
            await asyncio.sleep(LOOK_S)
            try:
                show(await logs.news())
            except PeerError:
                if clock.monotonic() - heard > LOST_S:
                    raise
                continue
            heard = clock.monotonic()


def _lines(page: LogLines) -> list[Line]:
    return [Line(page.log, line.time, line.text) for line in page.lines]
