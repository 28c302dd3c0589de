"""What a process says of itself while it is measured: how late its event loop is, and how much memory it
takes; and what the whole machine does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import statistics
import time
from pathlib import Path

PERIOD_S = 0.002
MIB = 1 << 20
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
TRAINER_MIB = 24  # of a trainer, whatever the model: records read ahead, connections, threads


def clean_environment() -> dict[str, str]:
    """Ours without TRIREME_*, for processes that are measured: a benchmark chooses what they get of these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}


class LoopLag:
    """`run` as a task: sleeps and notes by how much it was woken too late. uvloop counts milliseconds: up to
    one is its own."""

    def __init__(self) -> None:
        self._noted: list[tuple[float, float, float]] = []
        self._worked: list[float] = []

    async def run(self) -> None:
        while True:
            start, busy = time.monotonic(), time.thread_time()
            await asyncio.sleep(PERIOD_S)
            end = time.monotonic()
            self._noted.append((start, end, max(0.0, end - start - PERIOD_S)))
            self._worked.append(min(self._noted[-1][2], time.thread_time() - busy))

    def take(self, windows: list[tuple[float, float]]) -> list[float]:
        """Seconds, of those noted within `windows` (first, last: of time.monotonic, which all processes
        share); all are forgotten."""
        noted, self._noted = self._noted, []
        return [
            lag for start, end, lag in noted if any(first <= start and end <= last for first, last in windows)
        ]

    def take_all(self) -> tuple[list[float], list[float]]:
        """As `take`, whenever it was noted; and at most how much of each the loop's own thread worked: the
        rest it waited for a processor."""
        worked, self._worked = self._worked, []
        return self.take([(0.0, math.inf)]), worked


def p99_and_max(values: list[float]) -> tuple[float, float]:
    """Zeros for none."""
    if len(values) < 2:
        return (max(values, default=0.0),) * 2
    return statistics.quantiles(values, n=100, method="inclusive")[98], max(values)


def machine_ms() -> float:
    """Processor time that the whole machine has taken so far, by anybody."""
    user, nice, system, _idle, _waiting, interrupts, soft, stolen, *_ = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft + stolen) * TICK_MS


class Memory:
    """Resident bytes of this process above what it has now, at the highest (since `forget_peak`); pages of
    files (libraries, data) do not count."""

    def __init__(self) -> None:
        self.forget_peak()
        self._before = _status("VmRSS") - _status("RssFile")

    def forget_peak(self, *, trim: bool = True) -> None:
        """`trim`: what was freed before must not be used again unseen."""
        if trim:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return _status("VmHWM") - _status("RssFile") - self._before

    def now(self) -> int:
        return _status("VmRSS") - _status("RssFile") - self._before

    @staticmethod
    def borrowed() -> int:
        """Resident bytes of others' shared memory that this process only reads."""
        total, counts = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *rest = line.split()
            if not name.endswith(":"):
                counts = rest[0] == "r--s" and "memfd:" in line
            elif counts and name == "Rss:":
                total += int(rest[0]) << 10
        return total


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0
