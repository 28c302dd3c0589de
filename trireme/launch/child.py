"""One child process of the launcher: its log file, its end, its signals. No child outlives the launcher.

spawn -> alive -> ended(Exit)      each child leads its own session, so a Ctrl-C in the terminal reaches the
                                   launcher only; PDEATHSIG kills the child if the launcher itself is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trireme.launch.processes import Process, Start, spawn
from trireme_shared.platform.runtime import begun, clock
from trireme_shared.platform.runtime.service import EXIT_CODES, READY_FILE, health_url
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import TriremeError

TAIL_BYTES = 16 << 10
TAIL_LINES = 15


class ClusterError(TriremeError):
    """The cluster cannot go on: a child ends again and again. `details`: child, log, tail."""

    code = "CLUSTER_FAILED"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `code`: as subprocess gives it (negative: the signal's number)."""

    pid: int
    code: int
    lived_s: float

    def __str__(self) -> str:
        if self.code == EXIT_CODES["SCRIPT_CHANGED"]:
            return "its script or a module has changed since the job was created: restore it, or stop the job and start it again"
        return signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"


class Child:
    """A process that can be started again after its end; `starts` counts the starts. `group`: signals go to all processes of the group
    that it leads."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        start: Start = spawn,
        *,
        group: bool = False,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.environment = dict(environment)
        self.log = log
        self.starts = 0
        self._start, self._group = start, group
        self.process: Process | None = None
        self._since = 0.0
        self._last_end: Exit | None = None

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.alive else "not running"
        return f"<Child {self.name}: {state}, started {self.starts} times>"

    @property
    def pid(self) -> int:
        """0 if it was never started."""
        return self.process.pid if self.process else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def was_ready(self) -> bool:
        """Whether one of its processes has created the file that READY_FILE names; members do once they have started up."""
        return Path(self.environment.get(READY_FILE, "")).is_file()

    @property
    def health_url(self) -> str:
        """Where its present process answers for its health; "": it has not said so yet."""
        return health_url(Path(self.environment.get(READY_FILE, "")), self.pid)

    @property
    def left(self) -> begun.Left | None:
        """What its process had begun when it ended; None: nothing, or it keeps no record of that."""
        return begun.left_by(Path(self.environment[begun.FILE])) if begun.FILE in self.environment else None

    def pardon(self) -> None:
        """Its process was ended from outside, whatever it had begun."""
        if begun.FILE in self.environment:
            begun.pardon(Path(self.environment[begun.FILE]))

    async def start(self) -> None:
        """Start the process; its output is appended to `log`."""
        assert not self.alive, f"{self!r} is started twice"
        last_end = {begun.LAST_END: str(self._last_end)} if self._last_end is not None else {}
        with self._open_log() as out:
            self.process = await self._start(self.argv, self.environment | last_end, out, out)
        self.starts += 1
        self._since = clock.monotonic()

    def _open_log(self) -> IO[bytes]:
        private_files.make_missing(self.log.parent)
        return private_files.open_private(self.log, "ab")

    async def wait(self) -> Exit:
        """Wait for the end of the current process."""
        assert self.process is not None, f"{self!r} was never started"
        code = await self.process.wait()
        self._last_end = Exit(self.process.pid, code, clock.monotonic() - self._since)
        return self._last_end

    def send(self, number: signal.Signals) -> None:
        """Does nothing if it has ended."""
        if self.process is None or not self.alive:
            return
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
        else:
            self.process.send_signal(number)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds."""
        if not self.alive:
            return
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()


def tail_of(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
