"""What the terminal of `trireme run` shows while the job runs: its progress and events, and what the script
prints in trainers.

ProgressReporter    asks the master twice a second and shows what changed; if no master answers, it is asked
    again
ScriptOutput        log files of trainers ─► what was written since ─► lines that are not ours
    ─► so many of each trainer ─► Display.output

The log files keep everything. What a terminal could not show, or what would hide the progress, is counted and
told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trireme.view.child_events import ChildEvent
from trireme.view.job_address import AnyClient, Connect
from trireme.view.progress import Display, progress_of
from trireme.view.report import Counts, without_tokens
from trireme_shared.platform.etcd import NoSpace
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import redacted
from trireme_shared.protocol.errors import CursorExpired, PeerError, TriremeError
from trireme_shared.protocol.records import JobSpec, Mode, Phase, Stage, Strategy, TaskSummary
from trireme_shared.protocol.rest import EventPage, JobView

POLL_S = 0.5
SILENT_S = 3.0  # a master that is started again takes less
SHOWN_EVENTS = {
    "master_elected",
    "job_running",
    "generation_changed",
    "rolling_back",
    "rolled_back",
    "checkpoint_unusable",
    "checkpoint_failed",
    "storage_away",
    "etcd_has_space_again",
    "checkpoint_works_again",
    "started_over",
    "pserver_lost",
    "pserver_back",
    "checkpoint_given_up",
    "member_dead",
    "task_discarded",
    "setting_unused",
    "died_at_task",
    "evaluated",
    "best_unknown",
    "evaluation_left_out",
    "stopped_early",
    "stage_changed",
    "user_failure",
    "warning",
    "settings_changed",
    "steps_are_short",
    "records_left_out",
}


# the launcher does not know whether there is a checkpoint; the master tells it right afterwards
BACK = "the job goes back to its newest checkpoint, or starts over if it has none"

# what the death of a process means, if others of its kind are there and if not
CONSEQUENCES = {
    ("trainer", Mode.SYNC): (
        "other trainers take its lanes, no record is lost",
        "the job waits for it, no record is lost",
    ),
    ("trainer", Mode.ASYNC): (
        "other trainers continue its tasks where the ledgers stand",
        "the job waits for it",
    ),
    ("pserver", Mode.ASYNC): (
        "it returns with its newest checkpoint, the others go on; without one the job starts over",
        BACK,
    ),
    ("master", Mode.SYNC): ("trainers go on meanwhile", "trainers go on meanwhile"),
    ("master", Mode.ASYNC): ("trainers go on meanwhile", "trainers go on meanwhile"),
}

LOOK_S = 0.2
AT_ONCE = 100  # lines of one trainer; a traceback is whole
PER_SECOND = 20.0  # and then so many
TELL_S = 5.0  # how often a flood that goes on is told
BLOCK_BYTES = 1 << 20  # of one file at once
BEHIND_BYTES = 4 << 20  # what is further behind is left out without being read
LINE_CHARACTERS = 2000
LINE_BYTES = 64 << 10  # a longer line is cut
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]"
)

Shown = Sequence[tuple[str, str]]  # member and line


def too_few_tasks(spec: JobSpec, tasks: int, task_records: int) -> str:
    """A warning for the user if some trainers will have nothing to do, else ""."""
    if tasks >= spec.trainers:
        return ""
    made = f"{tasks} task{'' if tasks == 1 else 's'} of {task_records} records"
    return (
        f"an epoch has {made} for {spec.trainers} trainers: {spec.trainers - tasks} of them will "
        "have nothing to do; "
        "set a smaller records_per_task"
    )


class ProgressReporter:
    """Shows progress and events on `screen`. `restarts`: by child. The last loss and step are kept for the
    summary."""

    def __init__(
        self, spec: JobSpec, screen: Display, restarts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`restarts`: before the job was resumed."""
        self._spec, self._mode = spec, spec.mode
        self._counted = False  # whether the tasks of an epoch are known
        self._polling = asyncio.Lock()
        self.restarts = Counter(restarts)
        self._alive: set[str] = set()
        self._screen = screen
        self._last: JobView | None = None
        self._after = 0
        self._since = clock.timestamp()  # what happened before, the launcher of then has shown
        self._full = False

    def on_child(self, event: ChildEvent) -> None:
        if event.what != "held_up":
            (self._alive.add if event.what in ("started", "restarted") else self._alive.discard)(event.child)
        match event.what:
            case "held_up":
                self._screen.event(f"{event.child} (pid {event.pid}): {event.cause}")
            case "died" | "lost_lease" | "left":
                then = "; ".join([*self._consequence(event.child), "it is started again"])
                self._screen.event(f"{event.child} {event.end}: {then}")
            case "given_up":
                self._screen.event(f"{event.child} {event.end}: it is not started again")
            case "restarted":
                self.restarts[event.child] += 1
            case "unrecorded":
                self._screen.event(
                    f"what happens to members is not recorded for other commands ({event.cause})"
                )
            case "lease_left":
                self._screen.event(
                    f"{event.child}: its lease could not be revoked ({event.cause}); it expires by itself"
                )

    def _consequence(self, child: str) -> list[str]:
        kind = child.rpartition("-")[0]
        with_others, alone = CONSEQUENCES.get((kind, self._mode), ("", ""))
        if self._spec.strategy is Strategy.COLLECTIVE and kind == "trainer":
            alone = f"nobody has the parameters now: {BACK}"
        others = any(name.startswith(f"{kind}-") for name in self._alive)
        return [found] if (found := with_others if others else alone) else []

    async def run(self, connect: Connect, etcd_silent_s: Callable[[], float] = lambda: 0.0) -> None:
        """Poll until cancelled. `etcd_silent_s`: for how long etcd has not answered the launcher."""
        answered = clock.monotonic()
        while True:
            try:
                await self.poll(connect)
                answered, self._full = clock.monotonic(), False
            except NoSpace as error:  # no event can tell it: events are in etcd before anybody sees them
                if not self._full:
                    self._screen.event(without_tokens(f"{error.message}; {error.hint}"))
                answered, self._full = clock.monotonic(), True
            except PeerError:  # no master now: a standby takes over, or it is started again
                self._show_silence(clock.monotonic() - answered, etcd_silent_s())
            await asyncio.sleep(POLL_S)

    def _show_silence(self, silent_s: float, etcd_silent_s: float) -> None:
        if self._last and silent_s > SILENT_S:
            who = ("etcd", etcd_silent_s) if etcd_silent_s else ("the master", silent_s)
            progress = progress_of(self._last, self.restarts.total())
            stalled = f"waiting for {who[0]}, silent for {who[1]:.0f} s"
            self._screen.show(
                replace(progress, stalled=stalled, eta_s=None, records_per_s=None), clock.monotonic()
            )

    async def last_counts(self, connect: Connect) -> Counts:
        """The counts for the summary, as far as the master still answers."""
        with contextlib.suppress(TriremeError):
            await self.poll(connect)  # includes the last events
        discarded: list[dict[str, Any]] = []
        with contextlib.suppress(TriremeError):
            async with connect() as (client, job):
                tasks = client.list_tasks(job, state="DISCARDED")
                discarded = [task.model_dump(mode="json") async for task in tasks]
        losses: list[dict[str, Any]] = []
        with contextlib.suppress(TriremeError):
            async with connect() as (client, job):
                points = client.list_metrics(job, metric="epoch_loss")
                losses = [epoch.model_dump(mode="json") async for epoch in points]
        if self._last is None:
            return Counts(dict(self.restarts), None, None, 0, 0, discarded, losses)
        now = self._last.progress
        return Counts(dict(self.restarts), now.loss, now.step, now.records_done, now.epoch, discarded, losses)

    async def poll(self, connect: Connect) -> None:
        """Ask once and show what changed. Raises TriremeError."""
        async with (
            self._polling,  # so that each event is shown once
            connect() as (client, job),
        ):
            page = await self._events(client, job)
            self._last = await client.get_job(job)
            over = Phase(self._last.phase).final
            if not self._counted and not over and self._last.stage is Stage.TRAIN:
                self._count(await client.get_task_summary(job))
            self._after = page.next_after  # last, so that a failed poll gets the same events again
        for event in page.events:
            if event.event_time < self._since:
                continue
            if event.name in SHOWN_EVENTS or (event.name == "task_requeued" and "failures" in event.fields):
                self._screen.event(without_tokens(event.message))
        if not over:  # at the end the summary follows instead
            self._screen.show(progress_of(self._last, self.restarts.total()), clock.monotonic())

    async def _events(self, client: AnyClient, job: str) -> EventPage:
        """The next page. What was forgotten before anybody asked for it is left out."""
        try:
            return await client.list_events(job, after=self._after)
        except CursorExpired as error:
            self._after = max(0, int(error.details.get("oldest", 1)) - 1)
            return await client.list_events(job, after=self._after)

    def _count(self, summary: TaskSummary) -> None:
        """`summary`: of the tasks of an epoch; there are none while the dataset is being counted."""
        self._counted = summary.total > 0
        if self._counted and (warning := too_few_tasks(self._spec, summary.total, summary.task_records)):
            self._screen.event(warning)


def is_of_script(line: bytes) -> bool:
    """Whether our logger did not write it: ours are JSON objects with these names."""
    return not (
        line.startswith(b'{"')
        and all(name in line for name in (b'"event": ', b'"service": ', b'"timestamp": '))
    )


def shown(line: bytes) -> str:
    """As a terminal would leave it: of a progress bar the last state. Without what would move the cursor,
    without tokens."""
    text = line[:LINE_BYTES].decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    text = redacted(_CONTROL.sub("", text))
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"


class ScriptOutput:
    """Of the trainers whose logs lie in a folder. What the files already hold was shown by an earlier run."""

    def __init__(self, logs: Path, show: Callable[[Shown], None]) -> None:
        self._logs, self._show = logs, show
        self._files: dict[Path, Printed] = {path: Printed(path, _size(path)) for path in self._paths()}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look(clock.monotonic())
            await asyncio.sleep(LOOK_S)

    def look(self, now: float, *, last: bool = False) -> None:
        """Shows what is new. `last`: the trainers have ended."""
        lines = list[tuple[str, str]]()
        for path in self._paths():
            output = self._files.setdefault(path, Printed(path, 0))
            lines += [(path.stem, line) for line in output.news(now, last=last)]
        if lines:
            self._show(lines)

    def _paths(self) -> list[Path]:
        return sorted(self._logs.glob("trainer-*.log"))


class Printed:
    """What one process prints into a file: of a trainer, or of a script that is checked. `place`: the byte
    from which it is read on. `stays`: the file is there later, too."""

    def __init__(self, path: Path, place: int = 0, *, stays: bool = True) -> None:
        self._path, self._place = path, place
        self._where = f"; all are in {path}" if stays else ""
        self._allowed, self._since = float(AT_ONCE), clock.monotonic()
        self._left_out, self._unread, self._told = 0, False, float("-inf")

    def news(self, now: float, *, last: bool) -> list[str]:
        """The lines since the last call. `last`: it has ended."""
        self._allowed = min(float(AT_ONCE), self._allowed + max(0.0, now - self._since) * PER_SECOND)
        self._since = now
        lines = [shown(line) for line in self._taken(last=last)]
        # a flood that stopped is told at once, one that goes on now and then
        ended = last or self._allowed >= AT_ONCE
        if (self._left_out or self._unread) and (ended or now - self._told >= TELL_S):
            count = f"{'more than ' if self._unread else ''}{self._left_out:,} lines"
            lines.append(f"… {count} are left out here{self._where}")
            self._left_out, self._unread, self._told = 0, False, now
        return lines

    def _taken(self, *, last: bool) -> list[bytes]:
        found = list[bytes]()
        for line in self._read(last=last):
            if not is_of_script(line):
                continue
            if self._allowed >= 1:
                self._allowed -= 1
                found.append(line)
            else:
                self._left_out += 1
        return found

    def _read(self, *, last: bool) -> list[bytes]:
        """Whole lines. A file that was deleted or cannot be read has none."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._place:
                    self._place = 0
                if size - self._place > BEHIND_BYTES:
                    self._unread, self._place = True, size - BLOCK_BYTES
                    block = os.pread(file.fileno(), BLOCK_BYTES, self._place)
                    self._place += block.find(b"\n") + 1  # the rest of a line
                block = os.pread(file.fileno(), BEHIND_BYTES if last else BLOCK_BYTES, self._place)
        except OSError:
            return []
        end = block.rfind(b"\n") + 1
        if (last and end < len(block)) or len(block) - end > LINE_BYTES:  # a line without an end
            end = len(block)
        self._place += end
        return block[:end].removesuffix(b"\n").split(b"\n") if end else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
