"""`trireme logs` and `trireme events`: what members wrote, and what happened.

logs      of this machine's data folder, or of a master elsewhere that is named: by its REST API, also through
          changes of the master
          listing ─► each log from its end backwards, until enough ─► shown by time
                  ─► listing: what has grown is read on ─► ...
events    from the job's master, or as the run kept them beside its result: its master ended with it
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path

from trireme.cli import exit_codes
from trireme.cli.targets import Target, checked_name, job_target, local_run, target_in_cluster
from trireme.client import ONLY_JOB, AsyncClient
from trireme.launch import run_folder
from trireme.pool import cluster_folder
from trireme.view.job_address import JOBS, Connect, open_job
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.log_files import Line, Logs, is_of
from trireme_shared.protocol.errors import CursorExpired, InvalidArgument, NotFound, PeerError, TriremeError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.rest import LogLines, LogView
from trireme_shared.protocol.times import instant, rfc3339

LOOK_S = 0.2
REMOTE_LOOK_S = 1.0  # for news of a master elsewhere
LONG_POLL_S = 5.0
LOST_S = 60.0  # how long nobody may answer for what is followed
PAGE = 1000
PAGES = 16  # of one log at once
NAMES = 20
EVENTS_FILE = "events.json"  # of a run that has ended
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_when = attrgetter("time")


def logs(
    member: str | None,
    job: str | None,
    data_dir: Path | None,
    url: str | None = None,
    *,
    follow: bool,
    since: str | None,
    tail: int,
    as_json: bool,
) -> int:
    """The exit code. `since`: RFC 3339, or `10m` ago. A folder that is named goes before TRIREME_URL."""
    telemetry.configure(level="ERROR", json=False)
    try:
        if given := url or (os.environ.get("TRIREME_URL") if data_dir is None else None):
            asyncio.run(
                follow_logs(
                    given,
                    job,
                    member or "",
                    tail,
                    _since(since),
                    partial(_print_lines, as_json=as_json),
                    follow=follow,
                )
            )
            return exit_codes.OK
        folders = _folders(job, data_dir)
        found = Logs(partial(_paths, folders), member or "")
        if not found.members:
            others = ", ".join(Logs(partial(_paths, folders)).members) or "none"
            what = f"of {member} " if member else ""
            msg = f"there is no log {what}in {' or '.join(map(str, folders))}; there are: {others}"
            raise NotFound(
                msg, hint="logs of members on other hosts lie in the data folder of their host agent"
            )
        _print_lines(found.last(tail, _since(since)), as_json=as_json)
        while follow:
            _print_lines(found.news(), as_json=as_json)
            clock.sleep(LOOK_S)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def _folders(job: str | None, data_dir: Path | None) -> list[Path]:
    """Where the logs of the job's members lie: of a job of the cluster here, or of a run. Raises NotFound,
    InvalidArgument."""
    if target_in_cluster(job, data_dir) is not None:
        place = cluster_folder.place_of(data_dir)
        return (
            [place / "host" / "logs" / checked_name(job)]
            if job
            else [place / "logs", place / "host" / "logs"]
        )
    return [run_folder.find_run(data_dir, job)[0] / "logs"]


def _paths(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.log"))


def _since(text: str | None) -> str:
    """As a time in UTC. Raises InvalidArgument."""
    if not text:
        return ""
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
        return rfc3339(clock.wall_time() - int(found[1]) * _UNITS[found[2]])
    try:
        return rfc3339(instant(text))
    except ValueError as error:
        raise InvalidArgument(f"{error}; or so long ago as 90s, 10m, 2h, 1d") from error


def _print_lines(lines: Iterable[Line], *, as_json: bool) -> None:
    for line in lines:
        shown = {"member": line.member, "time": line.time, "text": line.text}
        print(json.dumps(shown) if as_json else f"{line.member}  {line.text}", flush=True)  # noqa: T201


def events(
    job: str | None, data_dir: Path | None, url: str | None, *, after: int, follow: bool, as_json: bool
) -> int:
    """The exit code. Those of the job that is meant: from its master, or as its run kept them when it
    ended."""
    telemetry.configure(level="ERROR", json=False)
    try:
        folder = local_run(job, data_dir, url)
        kept = kept_events(folder) if folder is not None and not run_folder.is_running(folder) else None
        if kept is not None:
            _print_events([event for event in kept if event.event_id > after], as_json=as_json)
            return exit_codes.OK
        asyncio.run(
            follow_events(partial(job_target, job, data_dir, url), after, follow=follow, as_json=as_json)
        )
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def _print_events(events: Iterable[EventRecord], *, as_json: bool) -> None:
    for event in events:
        line = f"{event.event_id}  {event.event_time}  {event.name}  {event.message}"
        print(event.model_dump_json() if as_json else line, flush=True)  # noqa: T201


async def follow_events(target: Callable[[], Target], after: int, *, follow: bool, as_json: bool) -> None:
    """Print the events of a job, and with `follow` those that come. The master is looked up again when
    another one leads. Raises PeerError after LOST_S without an answer."""
    heard = clock.monotonic()
    while True:
        try:
            found = target()
            async with open_job(found.address, token=found.token) as (client, job):
                page = await client.list_events(job, after=after, wait_s=LONG_POLL_S if follow else 0.0)
        except CursorExpired as error:
            if not follow:
                raise
            print(f"some events are forgotten: {error.message}", file=sys.stderr)  # noqa: T201
            after = max(0, int(error.details.get("oldest", 1)) - 1)
            continue
        except PeerError:
            if not follow or clock.monotonic() - heard > LOST_S:
                raise
            await asyncio.sleep(LOOK_S)
            continue
        heard, after = clock.monotonic(), page.next_after
        _print_events(page.events, as_json=as_json)
        if not page.events and not follow:
            return


class RemoteLogs:
    """The logs of a job, those that appear later too. `wanted`: the member or members whose logs are meant;
    "": all."""

    def __init__(self, client: AsyncClient, job: str, wanted: str) -> None:
        self._client, self._job, self._wanted = client, job, wanted
        self._cursors: dict[str, int] = {}
        self._read: dict[str, list[Line]] = {}  # and not given yet

    async def names(self, wanted: str = "") -> list[str]:
        return [
            view.log
            async for view in self._client.list_logs(self._job)
            if not wanted or is_of(view.log, wanted)
        ]

    async def last(self, count: int, since: str) -> list[Line]:
        """At most `count`, none before `since`, in the order of time."""
        found = [await self._last(log, count, since) for log in await self.names(self._wanted)]
        lines = list(heapq.merge(*found, key=_when))
        return lines[-count:] if count else []

    async def news(self) -> list[Line]:
        """What was written since `last`, or since the `news` before. After an error, what was read comes with
        the next ones."""
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
    """Shows the last lines, and with `follow` what comes. Raises NotFound; PeerError if nobody answers, while
    it follows after LOST_S."""
    root, _, named = url.partition(JOBS)
    async with AsyncClient(root) as client:
        name = checked_name(job or named.strip("/")) if job or named else (await client.get_job(ONLY_JOB)).job
        logs = RemoteLogs(client, name, wanted)
        if not await logs.names(wanted):
            there = await logs.names()
            others = ", ".join(there[:NAMES]) + (", ..." if len(there) > NAMES else "")
            msg = (
                f"the master has no log {f'of {wanted} ' if wanted else ''}of job {name}; it has: "
                f"{others or 'none'}"
            )
            raise NotFound(
                msg, hint="logs of members on other hosts lie in the data folder of their host agent"
            )
        show(await logs.last(tail, since))
        heard = clock.monotonic()
        while follow:
            await asyncio.sleep(REMOTE_LOOK_S)
            try:
                show(await logs.news())
            except PeerError:
                if clock.monotonic() - heard > LOST_S:
                    raise
                continue
            heard = clock.monotonic()


def _lines(page: LogLines) -> list[Line]:
    return [Line(page.log, line.time, line.text) for line in page.lines]


async def all_events(connect: Connect) -> list[EventRecord]:
    """All that the job's log still has, oldest first; those before an error if the master fails meanwhile."""
    found: list[EventRecord] = []
    with contextlib.suppress(TriremeError):
        async with connect() as (client, job):
            while page := (await client.list_events(job, after=found[-1].event_id if found else 0)).events:
                found += page
    return found


def keep_events(folder: Path, events: list[EventRecord]) -> None:
    """A disk that is full costs the events, not the run."""
    with contextlib.suppress(OSError):
        run_folder.write_json(
            folder / EVENTS_FILE, {"events": [event.model_dump(mode="json") for event in events]}
        )


def kept_events(folder: Path) -> list[EventRecord] | None:
    """None: the run has not ended, or it ended without a master that could tell them."""
    found = run_folder.read_json(folder / EVENTS_FILE)
    return None if found is None else [EventRecord.model_validate(event) for event in found.get("events", ())]
