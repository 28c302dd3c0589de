"""A member of a job that tells how late its event loop is and how much memory it takes.

    python -m benchmarks.probed MODULE     as `python -m MODULE`, TRIREME_PROBE naming a file

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

from benchmarks.probe import LagProbe, Memory
from shared.runtime import service
from trireme.launch.fork_server import NEEDS

FILE = "TRIREME_PROBE"


def main() -> None:
    module = sys.argv.pop(1)
    for name in NEEDS[module]:  # what a fork server would have imported before
        importlib.import_module(name)
    memory, file, run = Memory(), Path(os.environ.pop(FILE)), service.run

    def probed_run(work: Callable[[asyncio.Event], Awaitable[int]], **options: Any) -> int:
        return run(lambda stopping: _beside(work(stopping), memory, file), **options)

    service.run = probed_run
    runpy.run_module(module, run_name="__main__", alter_sys=True)


async def _beside(work: Awaitable[int], memory: Memory, file: Path) -> int:
    loop, probe = asyncio.get_running_loop(), LagProbe()
    probing: list[asyncio.Task[None]] = []

    def begin() -> None:
        memory.forget_peak(trim=False)  # of the lanes it has now, and with all that its allocator keeps
        probing.append(loop.create_task(probe.run()))

    def end() -> None:
        probing.pop().cancel()
        new = file.with_suffix(".new")
        lags, worked = probe.take_all()
        seen = {"lags": lags, "worked": worked, "memory": memory.peak(), "borrowed": memory.borrowed()}
        new.write_text(json.dumps(seen))
        new.rename(file)

    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGUSR2, end)
    try:
        return await work
    finally:
        with contextlib.suppress(IndexError):
            probing.pop().cancel()


if __name__ == "__main__":
    main()
