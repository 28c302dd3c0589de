"""The trackers of one job follow its stored metrics: each gets what it lacks, as fast as it takes it.

stored series ─ look() ─► what each idle tracker lacks ─► its thread          late, well again, ended ─► told once

Nothing is kept for a tracker that is late: what it lacks is in the job's storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from master_service.core.state.series import SeriesTable
from master_service.core.state.whole_steps import WholeSteps
from master_service.storage.series_files import FOLDER, add_encoded, to_read
from master_service.trackers.assignment import Assignment, News
from master_service.trackers.memory import Memory
from master_service.trackers.points import behind, new_points
from master_service.trackers.worker import Worker
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.platform.storage import files

PORTION = 5000  # points of one call
LATE_S = 30.0  # that a call may last before it is told
ATTEMPTS = 5


class Follower:
    """`tell` gets what is new; `wake` is called, in other threads, when a look may do something. Blocks while it reads the storage; what trackers do is in other threads. Raises OSError."""

    def __init__(self, assignment: Assignment, tell: Callable[[News], None], wake: Callable[[], object]) -> None:
        self._memory = Memory(assignment.storage)
        self._series = reader_of(assignment.storage)
        self._tell = tell
        self._memory.go_on()
        run = self._memory.begin()
        self._workers = [Worker(wanted, assignment, self._memory, run, wake) for wanted in assignment.trackers]
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
        points = new_points(self._series.table, self._series.steps.next, worker.told or {}, PORTION, over=over)
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
    return StoredSeriesReader(lambda: files.names(folder), lambda name: files.read_bytes(files.join(folder, name)))


class StoredSeriesReader:
    """`names`: of all files there are now; `read`: one of them; both block, and raise OSError. `table`, `steps`: as far as they were
    read."""

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
