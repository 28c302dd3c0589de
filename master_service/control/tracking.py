"""The process beside a leader that follows one job for its trackers (master_service/trackers): started,
permitted, heard, ended.

run(): process ◄─ Permit every PERMIT_S, while the lease lasts
process ─ News ─► an event and a line in the log
process dies, or says nothing for SILENT_S ─► killed, a pause, a new one
job over, all logged ─► run() returns

The leader only writes what fits into the pipe, and waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import Any

from master_service.core.changes import Event
from master_service.trackers.assignment import Assignment, News, Permit, assignment_of
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.process_setup import die_with_parent
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job import JobResult

PERMIT_S = 0.5
SILENT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PIPE_BYTES = 16 << 10
LINE_BYTES = 64 << 10
MOST_LINES = 200  # of what trackers print, from each process

log = telemetry.logger("tracking")

FindFolder = Callable[[], Awaitable[Path]]


def result_of(phase: str, reason: str, result: JobResult) -> dict[str, Any]:
    """What trackers are told of a job's end."""
    told = result.model_dump(
        mode="json", include={"metrics", "trained_records", "discarded_records", "best", "stopped_step"}
    )
    return {"phase": phase, "reason": reason, **told}


class Tracking:
    """`permitted_s`: so long this leader is certainly alone. `result`: what trackers are told of the job's
    end once all its metrics are stored; None: it goes on. `tell`: gets events. `find_folder`: where the
    modules beside the job's script are. Run `run`."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        permitted_s: Callable[[], float],
        result: Callable[[], dict[str, Any] | None],
        tell: Callable[[list[Event]], None],
        find_folder: FindFolder,
    ) -> None:
        self.spec, self._permitted_s, self._result = spec, permitted_s, result
        self._tell, self._find_folder = tell, find_folder
        self._over = False
        self.heard = 0  # how often a process has said something
        self.late: dict[str, str] = {}  # by tracker, why

    def __repr__(self) -> str:
        return f"<Tracking of {self.spec.job}: {'over' if self._over else self.late or 'well'}>"

    async def run(self) -> None:
        """Until all trackers were told the end, or cancelled: then the process is gone."""
        pause_s = FIRST_PAUSE_S
        while not self._over:
            began = clock.monotonic()
            try:
                with tempfile.TemporaryDirectory(
                    prefix="trireme-trackers-", ignore_cleanup_errors=True
                ) as temporary:
                    await self._one_process(temporary)
            except (OSError, TriremeError) as error:
                self._say("", f"{type(error).__name__}: {error}")
            if clock.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            if not self._over:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _one_process(self, temporary: str) -> None:
        """`temporary`: for the files of trackers, which are not closed when it is killed."""
        own = any(tracker.is_own for tracker in self.spec.trackers)
        assignment = assignment_of(self.spec, str(await self._find_folder()) if own else "")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "master_service.trackers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**_environment(), "TMPDIR": temporary},
            start_new_session=True,
            preexec_fn=die_with_parent(),
            limit=LINE_BYTES,
        )
        try:
            async with asyncio.TaskGroup() as group:
                permits = group.create_task(self._permit(process, assignment))
                output = group.create_task(self._pass_on(process))
                told = await self._hear(process)
                permits.cancel()
                output.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(asyncio.ensure_future(process.wait()))
        if process.returncode == 0:
            self._over = True
        else:
            self._say(
                "",
                told or f"the process that follows them ended with {process.returncode}; another one begins",
            )

    async def _permit(self, process: asyncio.subprocess.Process, assignment: Assignment) -> None:
        pipe = process.stdin
        assert pipe is not None, "the process has no input"
        with contextlib.suppress(ConnectionError):
            pipe.write(assignment.to_bytes() + b"\n")
            while True:
                if pipe.transport.get_write_buffer_size() < PIPE_BYTES:
                    until = clock.monotonic() + self._permitted_s()
                    pipe.write(Permit(until=until, result=self._result()).to_bytes() + b"\n")
                await asyncio.sleep(PERMIT_S)

    async def _hear(self, process: asyncio.subprocess.Process) -> str:
        """Until it ends; why it must be ended, or ""."""
        assert process.stdout is not None, "the process has no output"
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    line = await process.stdout.readline()
                    if not line:
                        await process.wait()
                        return ""
                    news = News.model_validate_json(line)
            except TimeoutError:
                return (
                    f"the process that follows them has said nothing for {SILENT_S:g} s; another one begins"
                )
            except ValueError as error:
                return f"the process that follows them gave no news but {error}"[:500]
            self._note(news)

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """What trackers print, into our log."""
        assert process.stderr is not None, "the process has no output"
        count = 0
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than LINE_BYTES
                continue
            if not line:
                return
            count += 1
            if count <= MOST_LINES:
                log.info(
                    "tracker_output",
                    job=self.spec.job,
                    line=hidden(line.decode(errors="replace").rstrip())[:2000],
                )
            elif count == MOST_LINES + 1:
                log.info("tracker_output_left_out", job=self.spec.job, lines=MOST_LINES)

    def _note(self, news: News) -> None:
        self.heard += 1
        match news.state:
            case "late":
                lacks = f"lacks {news.behind} steps" if news.behind else "is late"
                self._say(news.tracker, f"{lacks}: {news.cause}")
            case "well":
                self.late.pop(news.tracker, None)
                message = f"tracker {news.tracker} goes on, and gets what it lacked"
                self._tell([Event("tracker_goes_on", message, {"tracker": news.tracker})])
            case "ended":
                self.late.pop(news.tracker, None)
            case _:
                pass

    def _say(self, tracker: str, cause: str) -> None:
        """Trackers that are late get what they lack when they can, so nothing is lost."""
        cause = hidden(cause)
        self.late[tracker] = cause
        who = f"tracker {tracker}" if tracker else "the job's trackers: "
        message = f"{who} {cause}. Training goes on; the job's stored metrics have everything".replace(
            ":  ", ": "
        )
        self._tell([Event("tracker_late", message, {"tracker": tracker, "cause": cause})])


def _environment() -> dict[str, str]:
    """Ours, with the credentials of servers and storages, but none of our own services."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}


async def finish(
    spec: JobSpec,
    result: dict[str, Any],
    limit_s: float,
    tell: Callable[[list[Event]], None],
    find_folder: FindFolder,
    permitted_s: Callable[[], float] = lambda: inf,
) -> dict[str, str]:
    """For a job that has ended and that nobody leads: its trackers get what they lack, and the end. By
    tracker why it is still late after `limit_s`; empty: all have all."""
    deadline = clock.monotonic() + limit_s
    tracking = Tracking(
        spec,
        permitted_s=lambda: max(0.0, min(deadline - clock.monotonic(), permitted_s())),
        result=lambda: result,
        tell=tell,
        find_folder=find_folder,
    )
    try:
        async with asyncio.timeout(limit_s):
            await tracking.run()
    except TimeoutError:
        return tracking.late or {"": f"not done within {limit_s:g} s"}
    return {}
