"""`trireme logs` and `trireme events`: what members wrote, and what happened. The logs are those of this machine's data folder, or come
from a master that is named (remote_logs.py)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from trireme.cli import exit_codes
from trireme.cli.history.kept_events import kept_events
from trireme.cli.targets import Target, checked_name, job_target, local_run, target_in_cluster
from trireme.launch import run_folder
from trireme.pool import cluster_folder
from trireme.view.job_address import open_job
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.log_files import Line, Logs
from trireme_shared.protocol.errors import CursorExpired, InvalidArgument, NotFound, PeerError, TriremeError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.times import instant, rfc3339

LOOK_S = 0.2
LONG_POLL_S = 5.0
LOST_S = 60.0  # how long nobody may answer for events that are followed
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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
            from trireme.cli.history.remote_logs import follow_logs  # noqa: PLC0415  pydantic and httpx

            asyncio.run(
                follow_logs(
                    given, job, member or "", tail, _since(since), partial(_print_lines, as_json=as_json), follow=follow
                )
            )
            return exit_codes.OK
        folders = _folders(job, data_dir)
        found = Logs(partial(_paths, folders), member or "")
        if not found.members:
            others = ", ".join(Logs(partial(_paths, folders)).members) or "none"
            what = f"of {member} " if member else ""
            msg = f"there is no log {what}in {' or '.join(map(str, folders))}; there are: {others}"
            raise NotFound(msg, hint="logs of members on other hosts lie in the data folder of their host agent")
        _print_lines(found.last(tail, _since(since)), as_json=as_json)
        while follow:
            _print_lines(found.news(), as_json=as_json)
            clock.sleep(LOOK_S)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except BrokenPipeError:
        forget_output()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def forget_output() -> None:
    """Nobody reads it any more (`| head`): what Python still holds goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _folders(job: str | None, data_dir: Path | None) -> list[Path]:
    """Where the logs of the job's members lie: of a job of the cluster here, or of a run. Raises NotFound, InvalidArgument."""
    if target_in_cluster(job, data_dir) is not None:
        place = cluster_folder.place_of(data_dir)
        return [place / "host" / "logs" / checked_name(job)] if job else [place / "logs", place / "host" / "logs"]
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


def events(job: str | None, data_dir: Path | None, url: str | None, *, after: int, follow: bool, as_json: bool) -> int:
    """The exit code. Those of the job that is meant: from its master, or as its run kept them when it ended."""
    telemetry.configure(level="ERROR", json=False)
    try:
        folder = local_run(job, data_dir, url)
        kept = kept_events(folder) if folder is not None and not run_folder.is_running(folder) else None
        if kept is not None:
            _print_events([event for event in kept if event.event_id > after], as_json=as_json)
            return exit_codes.OK
        asyncio.run(follow_events(partial(job_target, job, data_dir, url), after, follow=follow, as_json=as_json))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    except BrokenPipeError:
        forget_output()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


def _print_events(events: Iterable[EventRecord], *, as_json: bool) -> None:
    for event in events:
        line = f"{event.event_id}  {event.event_time}  {event.name}  {event.message}"
        print(event.model_dump_json() if as_json else line, flush=True)  # noqa: T201


async def follow_events(target: Callable[[], Target], after: int, *, follow: bool, as_json: bool) -> None:
    """Print the events of a job, and with `follow` those that come. The master is looked up again when another one leads. Raises
    PeerError after LOST_S without an answer."""
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
