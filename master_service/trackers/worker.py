"""One tracker in a thread of its own: what it raises or how long it takes concerns nobody else.

made ─► begin ─► idle ◄─► log ─► end          it raises ─► closed, a pause, made anew: it gets what it lacks
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from master_service.trackers.assignment import Assignment
from master_service.trackers.made import make
from master_service.trackers.memory import Memory
from master_service.trackers.points import told_with
from master_service.trackers.tracker import Point, Run, Tracker
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.job_choices import Tracker as Wanted

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
MOST_TEXT = 500


class Worker:
    """`told`: by metric the first step that the tracker lacks; None until it has begun. `cause`: why it does nothing now, or "".
    `busy_since`: of the call that lasts; None: it is idle. `wake` is called when it is idle or has ended. `ended`: it was told the end."""

    def __init__(
        self, wanted: Wanted, assignment: Assignment, memory: Memory, run: tuple[str, int], wake: Callable[[], object]
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
                tracker = make(self.wanted, Path(self._assignment.beside) if self._assignment.beside else None)
                told = tracker.begin(self._begun())
                known = self._memory.load(self.wanted.kind).get("told", {}) if told is None else told
                self._by_memory = told is None
                self.told = {str(name): int(step) for name, step in known.items()}
                while not self.ended:
                    self.busy_since = None
                    self._wake()
                    self._work.get()(tracker)
                    self.cause, self._pause_s = "", FIRST_PAUSE_S
            except BaseException as error:  # noqa: BLE001  a user's code may raise anything; the thread goes on
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
