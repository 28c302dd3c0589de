"""Whether a process works, as the kernel counts it: only Linux tells, in /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

WORKS_FROM = 0.05  # of a processor; who only waits for an answer, or asks again and again, takes about a hundredth
_STOPPED = ("T", "t")  # by a signal, by a debugger
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """`seconds`: processor time of all its threads since its start."""

    seconds: float
    stopped: bool

    def works(self, before: ProcessorUse | None, elapsed_s: float) -> bool:
        """Whether it has worked since `before`, `elapsed_s` ago; not if it is stopped by now, or if nothing is known of then."""
        return before is not None and not self.stopped and self.seconds - before.seconds >= WORKS_FROM * elapsed_s


def processor_use(pid: int) -> ProcessorUse | None:
    """None: nothing is known of it, because it has ended or this system has no /proc."""
    try:
        return parsed(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def parsed(stat: str) -> ProcessorUse:
    """A line of /proc/<pid>/stat; see proc(5). The name, in brackets, may have brackets and spaces."""
    state, *fields = stat.rpartition(")")[2].split()
    return ProcessorUse((int(fields[10]) + int(fields[11])) / _TICKS_PER_S, state in _STOPPED)
