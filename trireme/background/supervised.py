"""The process of a background run, as its parent sees it.

a thread: start the process ─► read its messages (process.py) ─► End
other threads: wait for the beginning or the end, interrupt, kill

The thread lives as long as the process: on Linux the kernel kills a child when the thread that started it
ends, so the process also dies with a parent that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from trireme.background.errors import InvalidSetting, JobFailed, JobStopped, in_python
from trireme.background.series import losses_in
from trireme.launch.processes import PYTHON_MODULE
from trireme.settings import UsageError
from trireme.view.progress import Progress
from trireme.view.report import failure_lines
from trireme_shared.protocol.errors import PeerError, TriremeError, UserCodeError, from_map
from trireme_shared.protocol.records import Phase, UserFailure

MODULE = "trireme.background.process"
SPAWN_S = 60.0
TAIL_BYTES = 4 << 10
MOST_EVENTS, MOST_LINES, MOST_LOSSES = 100, 100, 1000


@dataclass(slots=True)
class Told:
    """What a run has told until now. `losses`: by step, as often as it was told; `lines`: member and what its
    script printed."""

    progress: Progress = field(default_factory=lambda: Progress(phase="STARTING", stage=""))
    begun: Mapping[str, str] | None = None
    end: End | None = None
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    lines: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    losses: list[tuple[float, float]] = field(default_factory=list)

    def take_progress(self, progress: Progress) -> None:
        """In place."""
        self.progress = progress
        if progress.step is None or progress.loss is None:
            return
        while self.losses and self.losses[-1][0] >= progress.step:  # the job went back to a checkpoint
            self.losses.pop()
        self.losses.append((progress.step, progress.loss))
        if len(self.losses) > MOST_LOSSES:
            del self.losses[1::2]


class Watcher(Protocol):
    """Shows a run to the user."""

    def take(self, kind: str, value: Any, told: Told) -> None:
        """A message (process.py) that is in `told` already. Called in a thread of the run's own."""
        ...


class Supervised:
    """`asked`: what trireme.background.process reads. `watcher`: gets what happens; None: nobody does."""

    def __init__(self, asked: Mapping[str, Any], watcher: Watcher | None) -> None:
        self._owner = os.getpid()
        self._asked = {**asked, "parent": self._owner}
        self._watcher = watcher
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupts = 0
        self._is_told: set[str] = set()
        self._last: Mapping[str, Any] | None = None  # message
        self.told = Told()
        self._has_process = threading.Event()  # so that it can be killed
        self._thread = threading.Thread(target=self._follow, name=f"trireme {asked['script']}", daemon=True)
        self._thread.start()
        self._has_process.wait(SPAWN_S)

    @property
    def pid(self) -> int:
        """0: it has not started."""
        return self._process.pid if self._process else 0

    def wait(self, kinds: AbstractSet[str], limit_s: float | None) -> bool:
        """Until a message of one of these kinds has come, `begun` or `ended`. False: not within the limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_told.isdisjoint(kinds), limit_s)
            return not self._is_told.isdisjoint(kinds)

    def interrupt(self) -> None:
        """As Ctrl-C at the command does: save and stop; the second one stops at once."""
        self._interrupts += 1
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Its members die with it."""
        self._send(signal.SIGKILL)

    @property
    def is_ours(self) -> bool:
        """Not after a fork, in the new process."""
        return os.getpid() == self._owner

    @property
    def is_interrupted(self) -> bool:
        return self._interrupts > 0

    def _send(self, number: signal.Signals) -> None:
        """Nothing to a process that has ended, or is not ours."""
        if self._process is not None and self.is_ours:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def _what(self) -> str:
        return f"job {self.told.begun['job']}" if self.told.begun else str(self._asked["script"])

    # ------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        if self._asked["check"]:
            self._take("event", f"checking {self._asked['script']}")
        command = [*PYTHON_MODULE, MODULE, str(self._asked["script"])]  # the script for `ps` alone
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(  # noqa: S603  our own interpreter and module
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                self._set_end(End(error=PeerError(f"{command[0]} cannot be started: {error}")))
                self._has_process.set()
                return
            self._process = process
            self._has_process.set()
            try:
                self._read(process)
            except Exception as error:  # noqa: BLE001  whoever waits must hear of it
                process.kill()
                process.wait()
                self._set_end(End(error=PeerError(f"what {self._what} tells cannot be read: {error!r}")))
                return
            code = process.wait()  # the end is told when no process is left
            if self._last is not None:
                self._set_end(end_of(self._last, self._what, self._asked["again"]))
            else:
                self._set_end(end_of_dead(code, _tail(errors), self._what, self._asked["again"]))

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as asking, suppress(BrokenPipeError):
            asking.write(json.dumps(self._asked).encode() + b"\n")
        with process.stdout as told:
            for line in told:
                ((kind, value),) = json.loads(line).items()
                self._take(kind, value)

    def _take(self, kind: str, value: Any) -> None:
        match kind:
            case "progress":
                self.told.take_progress(Progress(**value))
            case "event":
                self.told.events.append(value)
            case "output":
                self.told.lines.extend((member, line) for member, line in value)
            case "begun":
                self.told.begun = value
            case "ended":
                self._last = value
                return
        self._tell(kind, value)

    def _set_end(self, end: End) -> None:
        # completed before: its folder is known all the same
        if self.told.begun is None and end.result is not None:
            folder = str(Path(end.result["logs"]).parent)
            self.told.begun = {"job": str(end.result["job"]), "folder": folder}
        if end.result is not None and self.told.begun is not None and self._watcher is not None:
            self.told.losses = losses_in(Path(self.told.begun["folder"]), MOST_LOSSES) or self.told.losses
        self.told.end = end
        self._tell("ended", end)

    def _tell(self, kind: str, value: Any) -> None:
        """First the user, so that what others print afterwards comes afterwards."""
        if self._watcher is not None:
            try:
                self._watcher.take(kind, value, self.told)
            except Exception:  # noqa: BLE001  what cannot be shown (a closed stderr) must not end the run
                self._watcher = None
        if kind in ("begun", "ended"):
            with self._changed:
                self._is_told.add(kind)
                self._changed.notify_all()


def _tail(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - TAIL_BYTES))
    return errors.read().decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class End:
    """`result`: the document of a job that has ended; `error`: why it is not COMPLETED."""

    result: Mapping[str, Any] | None = None
    error: TriremeError | None = None

    @property
    def phase(self) -> str:
        """STOPPED also after an error of the launcher: the job is unfinished, and nobody runs it."""
        return str(self.result["phase"]) if self.result is not None else "STOPPED"


def end_of(told: Mapping[str, Any], what: str, again: str) -> End:
    """`told`: the message. `what`: for the user, `job digits`. `again`: the call that resumes it."""
    if "stopped" in told:
        return End(error=JobStopped(f"{what} was stopped before its end", hint=f"resume it: {again}"))
    if "failure" in told:
        failure = UserFailure.model_validate(told["failure"])
        details = {"error_type": failure.error_type, "traceback": failure.traceback, "task": failure.task}
        return End(error=UserCodeError("\n".join([f"{what} failed:", *failure_lines(failure)]), **details))
    if "error" in told:
        return End(error=_error_of(told["error"]))
    result = told["result"]
    return End(result, None if result["phase"] == Phase.COMPLETED else _failed(result))


def end_of_dead(code: int, said: str, what: str, again: str) -> End:
    """The process ended without a last message. `code`: as subprocess gives it; `said`: the end of its
    stderr."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    message = f"the process that runs {what} has ended ({how})"
    return End(error=PeerError("\n".join([message, *([said] if said else [])]), hint=f"resume it: {again}"))


def _error_of(told: Mapping[str, Any]) -> TriremeError:
    error = from_map({**told, "message": in_python(told["message"]), "hint": in_python(told["hint"])})
    if isinstance(error, UsageError):
        return InvalidSetting(error.message, hint=error.hint, **error.details)
    if tail := error.details.get("tail"):
        error.add_note(f"the end of {error.details.get('log')}:\n{tail}")
    return error


def _failed(result: Mapping[str, Any]) -> JobFailed:
    lines = failure_lines(UserFailure.model_validate(result["failure"])) if result["failure"] else []
    again = "goes on from its newest checkpoint" if result["resumable"] else "starts from the beginning"
    message = "\n".join([f"job {result['job']} failed: {result['reason']}", *lines])
    return JobFailed(message, hint=f"the same call {again}; logs: {result['logs']}", result=dict(result))
