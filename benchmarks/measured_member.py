"""A member of a job that tells how late its event loop is and how much memory it takes.

    python -m benchmarks.measured_member MODULE     as `python -m MODULE`, TRIREME_PROBE naming a file

SIGUSR1: look at the loop from now on. SIGUSR2: look no more, write what was seen into the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.measurements import LoopLag, Memory
from trireme.launch.fork_server import NEEDS
from trireme_shared.platform.runtime import service

FILE = "TRIREME_PROBE"
# see without_metrics.py, which a master need not import
WITHOUT_METRICS = "TRIREME_BENCHMARK_WITHOUT_METRICS"


def main() -> None:
    module = sys.argv.pop(1)
    for name in NEEDS.get(module, ()):  # what a fork server would have imported before
        importlib.import_module(name)
    if os.environ.pop(WITHOUT_METRICS, ""):
        importlib.import_module("benchmarks.without_metrics").leave_out_metrics()
    memory, file, run = Memory(), Path(os.environ.pop(FILE)), service.run

    def measured_run(work: Callable[[asyncio.Event], Awaitable[int]], **options: Any) -> int:
        return run(lambda stopping: _beside(work(stopping), memory, file), **options)

    service.run = measured_run
    runpy.run_module(module, run_name="__main__", alter_sys=True)


async def _beside(work: Awaitable[int], memory: Memory, file: Path) -> int:
    loop, lag = asyncio.get_running_loop(), LoopLag()
    measuring: list[asyncio.Task[None]] = []

    def begin() -> None:
        memory.forget_peak(trim=False)  # of the lanes it has now, and with all that its allocator keeps
        measuring.append(loop.create_task(lag.run()))

    def end() -> None:
        measuring.pop().cancel()
        new = file.with_suffix(".new")
        lags, worked = lag.take_all()
        seen = {"lags": lags, "worked": worked, "memory": memory.peak(), "borrowed": memory.borrowed()}
        new.write_text(json.dumps(seen))
        new.rename(file)

    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGUSR2, end)
    try:
        return await work
    finally:
        with contextlib.suppress(IndexError):
            measuring.pop().cancel()


if __name__ == "__main__":
    main()
