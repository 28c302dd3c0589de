"""Whether a process works, by the processor time that the system counts for it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

WORKS_FROM = 0.05  # of a processor; who only waits for an answer, or asks again and again, takes about a hundredth
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # by a signal, by a debugger


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """`seconds`: processor time of all its threads since its start."""

    seconds: float
    stopped: bool

    def works(self, before: ProcessorUse | None, elapsed_s: float) -> bool:
        """Whether it has worked since `before`, `elapsed_s` ago; not if it is stopped by now, or if nothing is known of then."""
        return before is not None and not self.stopped and self.seconds - before.seconds >= WORKS_FROM * elapsed_s


def processor_use(pid: int) -> ProcessorUse | None:
    """None: nothing is known of it, because it has ended or the system does not tell."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return None
    return ProcessorUse(times.user + times.system, status in _STOPPED)
