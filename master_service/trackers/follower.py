"""The trackers of one job follow its stored metrics: each gets what it lacks, as fast as it takes it.

stored series ─ look() ─► what each idle tracker lacks ─► its thread (Worker)
late, well again, ended ─► told once

Nothing is kept for a tracker that is late: what it lacks is in the job's storage.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from master_service.core.state.series import SeriesTable, WholeSteps
from master_service.storage.series_files import FOLDER, add_encoded, to_read
from master_service.trackers.assignment import Assignment, Memory, News
from master_service.trackers.made import make
from master_service.trackers.tracker import Point, Run, Tracker, behind, new_points, told_with
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.job_choices import Tracker as Wanted

PORTION = 5000  # points of one call
LATE_S = 30.0  # that a call may last before it is told
ATTEMPTS = 5


class Follower:
    """`tell` gets what is new; `wake` is called, in other threads, when a look may do something. Blocks while
    it reads the storage; what trackers do is in other threads. Raises OSError."""

    def __init__(
        self, assignment: Assignment, tell: Callable[[News], None], wake: Callable[[], object]
    ) -> None:
        self._memory = Memory(assignment.storage)
        self._series = reader_of(assignment.storage)
        self._tell = tell
        self._memory.go_on()
        run = self._memory.begin()
        self._workers = [
            Worker(wanted, assignment, self._memory, run, wake) for wanted in assignment.trackers
        ]
        self._late = {worker.wanted.kind: Notices() for worker in self._workers}
        self._ended: set[str] = set()
        for worker in self._workers:
            worker.start()

    @property
    def ended(self) -> bool:
        """Whether all have all, and were told the end."""
        return all(worker.ended for worker in self._workers)

    @property
    def stuck_s(self) -> float:
        """How long the longest call lasts."""
        now = clock.monotonic()
        began = [worker.busy_since for worker in self._workers if not worker.cause and not worker.ended]
        return max((now - since for since in began if since is not None), default=0.0)

    def look(self, result: Mapping[str, Any] | None) -> None:
        """`result`: the job has ended."""
        self._series.look()
        for worker in self._workers:
            if worker.is_idle:
                self._give(worker, result)
            self._note(worker)
        if result is not None and self.ended:
            self._memory.end()

    def _give(self, worker: Worker, result: Mapping[str, Any] | None) -> None:
        over = result is not None
        points = new_points(
            self._series.table, self._series.steps.next, worker.told or {}, PORTION, over=over
        )
        if points:
            worker.log(points)
        elif result is not None:
            worker.end(result)

    def _note(self, worker: Worker) -> None:
        kind, cause, now = worker.wanted.kind, worker.cause, clock.monotonic()
        since = worker.busy_since
        if not cause and since is not None and now - since > LATE_S and not worker.ended:
            cause = f"its call has lasted for {now - since:.0f} s"
        late = self._late[kind]
        if cause:
            if late.due(now):
                lacks = behind(self._series.table, worker.told or {})
                self._tell(News(state="late", tracker=kind, cause=cause, behind=lacks))
        elif late.over():
            self._tell(News(state="well", tracker=kind))
        if worker.ended and kind not in self._ended:
            self._ended.add(kind)
            self._tell(News(state="ended", tracker=kind))


def reader_of(storage: str) -> StoredSeriesReader:
    """Of the files in a job's storage."""
    folder = files.join(storage, FOLDER)
    return StoredSeriesReader(
        lambda: files.names(folder), lambda name: files.read_bytes(files.join(folder, name))
    )


class StoredSeriesReader:
    """`names`: of all files there are now; `read`: one of them; both block, and raise OSError. `table`,
    `steps`: as far as they were read."""

    def __init__(self, names: Callable[[], list[str]], read: Callable[[str], bytes]) -> None:
        self._names, self._content_of = names, read
        self._read: list[str] = []
        self.table, self.steps = SeriesTable(), WholeSteps()

    def look(self) -> None:
        """Read what is new. Raises OSError."""
        for _ in range(ATTEMPTS):
            try:
                self._look()
            except FileNotFoundError:  # a master has put them together meanwhile
                continue
            return
        raise OSError("the files of metrics changed whenever they were read")

    def _look(self) -> None:
        names = to_read(self._names())[0]
        known = self._read == names[: len(self._read)]
        table, steps = (self.table, self.steps) if known else (SeriesTable(), WholeSteps())
        contents = [(name, self._content_of(name)) for name in names[len(self._read) * known :]]
        for name, content in contents:
            add_encoded(table, steps, content, name)
        self.table, self.steps, self._read = table, steps, names


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
MOST_TEXT = 500


class Worker:
    """One tracker in a thread of its own: what it raises or how long it takes concerns nobody else.

    made ─► begin ─► idle ◄─► log ─► end
    it raises ─► closed, a pause, made anew: it gets what it lacks

    `told`: by metric the first step that the tracker lacks; None until it has begun. `cause`: why it does
    nothing now, or "". `busy_since`: of the call that lasts; None: it is idle. `wake` is called when it is
    idle or has ended. `ended`: it was told the end.
    """

    def __init__(
        self,
        wanted: Wanted,
        assignment: Assignment,
        memory: Memory,
        run: tuple[str, int],
        wake: Callable[[], object],
    ) -> None:
        self.wanted = wanted
        self.told: Mapping[str, int] | None = None
        self.cause, self.ended = "", False
        self.busy_since: float | None = clock.monotonic()
        self._assignment, self._memory, self._run, self._wake = assignment, memory, run, wake
        self._work: queue.Queue[Callable[[Tracker], None]] = queue.Queue(1)
        self._pause_s = FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._live, name=wanted.kind, daemon=True)

    def __repr__(self) -> str:
        return f"<Worker {self.wanted.kind}: {self.cause or ('idle' if self.is_idle else 'busy')}>"

    def start(self) -> None:
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether it can be given something."""
        return self.told is not None and self.busy_since is None and not self.ended

    def log(self, points: list[Point]) -> None:
        """If it is idle."""
        self._give(partial(self._log, points))

    def end(self, result: Mapping[str, Any]) -> None:
        """If it is idle."""
        self._give(partial(self._end, result))

    def _give(self, work: Callable[[Tracker], None]) -> None:
        assert self.is_idle, f"{self!r} was given something"
        self.busy_since = clock.monotonic()
        self._work.put_nowait(work)

    # ---------------------------------------------------------------- in its thread

    def _live(self) -> None:
        while not self.ended:
            tracker: Tracker | None = None
            try:
                tracker = make(
                    self.wanted, Path(self._assignment.beside) if self._assignment.beside else None
                )
                told = tracker.begin(self._begun())
                known = self._memory.load(self.wanted.kind).get("told", {}) if told is None else told
                self._by_memory = told is None
                self.told = {str(name): int(step) for name, step in known.items()}
                while not self.ended:
                    self.busy_since = None
                    self._wake()
                    self._work.get()(tracker)
                    self.cause, self._pause_s = "", FIRST_PAUSE_S
            # a user's code may raise anything; the thread goes on
            except BaseException as error:  # noqa: BLE001
                self.told, self.busy_since = None, clock.monotonic()
                self.cause = text_of(error)
                if tracker is not None:
                    with contextlib.suppress(BaseException):
                        tracker.close()
                clock.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _begun(self) -> Run:
        number, attempt = self._run
        of = self._assignment
        remember = partial(self._memory.save, self.wanted.kind)
        known = self._memory.load(self.wanted.kind)
        return Run(of.job, number, attempt, of.storage, of.parameters, self.wanted, known, remember)

    def _log(self, points: list[Point], tracker: Tracker) -> None:
        tracker.log(points)
        after = told_with(self.told or {}, points)
        if self._by_memory:
            self._memory.save(self.wanted.kind, {"told": after})
        self.told = after

    def _end(self, result: Mapping[str, Any], tracker: Tracker) -> None:
        tracker.end(result)
        self.ended = True
        self._wake()


def text_of(error: BaseException) -> str:
    """What it says, in one line, without credentials."""
    message = error.message if isinstance(error, TriremeError) else f"{type(error).__name__}: {error}"
    return hidden(" ".join(message.split()))[:MOST_TEXT]
