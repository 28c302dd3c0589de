"""Stop a process with SIGSTOP, and know that it has stopped: the signal takes effect in each thread only when
that thread sees it.

Source of the states: proc_pid_stat(5).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOP_S = 5.0


def stop(pid: int) -> None:
    """Returns when all threads of `pid` are stopped, so that nothing that is asked from now on is answered.

    Raises:
        TimeoutError: some of them run after 5 s.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + STOP_S
    while running := [
        task.name for task in Path(f"/proc/{pid}/task").iterdir() if _state(task) not in "TtZX"
    ]:
        if time.monotonic() > end:
            raise TimeoutError(f"threads {running} of process {pid} run {STOP_S:g} s after SIGSTOP")
        time.sleep(0.001)


def _state(task: Path) -> str:
    """One letter; X of a thread that has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
