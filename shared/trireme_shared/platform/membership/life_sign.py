"""Whether a member's process works, for whoever supervises it: a sign of life beside its lease, and the
processor time it takes.

the event loop runs ─► `write` every few tenths of a second
user code keeps the interpreter ─► the sign gets old
    ─► supervisor: old, and the process is not stopped ─► it renews the lease
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import psutil

from trireme_shared.platform.runtime import clock

FILE = "TRIREME_LIFE_FILE"
# of a TTL without a sign: a third of it is left until the member would have renewed its lease twice
LATE = 0.3
LEAST_LATE_S = 0.5
_LAYOUT = struct.Struct("<QQddI")  # the last: a checksum, since the reader may meet a write half done


@dataclass(frozen=True, slots=True)
class LifeSign:
    """`at`: when the event loop of process `pid` ran last, by the clock that all processes of a machine
    share. `lease`: that it holds, of `ttl_s` seconds."""

    pid: int
    lease: int
    ttl_s: float
    at: float

    def to_bytes(self) -> bytes:
        body = _LAYOUT.pack(self.pid, self.lease, self.ttl_s, self.at, 0)
        return body[:-4] + zlib.crc32(body[:-4]).to_bytes(4, "little")

    @property
    def silent_s(self) -> float:
        return clock.monotonic() - self.at

    @property
    def is_late(self) -> bool:
        """Whether the loop is held up: it has not run for so long that the lease is in danger."""
        return self.silent_s > max(LEAST_LATE_S, LATE * self.ttl_s)


def read(path: Path) -> LifeSign | None:
    """None if there is none that can be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _LAYOUT.size or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):
        return None
    return LifeSign(*_LAYOUT.unpack(content)[:4])


class LifeFile:
    """The file of this process's sign, if its supervisor has named one. Close it at the end."""

    def __init__(self) -> None:
        self._path = Path(os.environ[FILE]) if os.environ.get(FILE) else None
        self._file: int | None = None
        if self._path is not None:
            with contextlib.suppress(OSError):  # without one the lease is only this process's matter
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, lease: int, ttl_s: float) -> None:
        """The event loop runs now."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, LifeSign(os.getpid(), lease, ttl_s, clock.monotonic()).to_bytes(), 0)

    def close(self) -> None:
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)


# of a processor; who only waits for an answer, or asks again and again, takes about a hundredth
WORKS_FROM = 0.05
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # by a signal, by a debugger


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """`seconds`: processor time of all its threads since its start."""

    seconds: float
    stopped: bool

    def works(self, before: ProcessorUse | None, elapsed_s: float) -> bool:
        """Whether it has worked since `before`, `elapsed_s` ago; not if it is stopped by now, or if nothing
        is known of then."""
        return (
            before is not None
            and not self.stopped
            and self.seconds - before.seconds >= WORKS_FROM * elapsed_s
        )


def processor_use(pid: int) -> ProcessorUse | None:
    """None: nothing is known of it, because it has ended or the system does not tell."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return None
    return ProcessorUse(times.user + times.system, status in _STOPPED)
