"""Threads for blocking work: parts of checkpoints are written in the background of training, other work is urgent.

narrow, write_part -> one thread of the lowest priority, with rests        load, write_manifest, remove -> the other threads
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trireme_shared.checkpoints import deltas, writer
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage.tensor_file import Summary

Offload = Callable[..., Awaitable[Any]]
"""`await offload(function, *arguments)`: run it where blocking does no harm."""

THREADS = 2  # a commit, a checkpoint being loaded
NICENESS = 19  # the lowest priority: what training leaves, and a seventieth of a core if training wants all of it
REST = 0.5  # of the working time: spreads the memory bandwidth that writing takes over more steps
WORK_S = 1e-3  # at least between two rests


class Abandoned(OSError):
    """The process ends: the file that was being written does not appear."""


class Pace:
    """The rests of the writing thread between two chunks. `hurried()`: the part is urgent, so there are no rests.

    Rests follow the thread's processor time. Time that it waits for a disk or a network costs training nothing.
    """

    def __init__(self, hurried: Callable[[], bool]) -> None:
        self._hurried = hurried
        self.ended = threading.Event()
        self._since = 0.0

    def begin(self) -> None:
        """Call it in the thread that writes."""
        self._since = clock.thread_seconds()

    def rest(self) -> None:
        """Raises Abandoned if `end` was called."""
        worked = clock.thread_seconds() - self._since
        if worked < WORK_S and not self.ended.is_set():
            return
        if self.ended.wait(0.0 if self._hurried() else worked * REST):
            raise Abandoned("this process ends")
        self._since = clock.thread_seconds()

    def end(self) -> None:
        self.ended.set()


class Background:
    """Call it to run a blocking function: `await background(function, *arguments)`. Close it at the end."""

    def __init__(self, hurried: Callable[[], bool] = lambda: False) -> None:
        self._pace = Pace(hurried)
        self._urgent = ThreadPoolExecutor(THREADS, "checkpoints")
        self._writing = ThreadPoolExecutor(1, "write", initializer=lower_priority)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        if function is writer.write_part:
            return await loop.run_in_executor(self._writing, self._write_part, *arguments)
        if function is deltas.narrow:
            return await loop.run_in_executor(self._writing, function, *arguments)
        return await loop.run_in_executor(self._urgent, function, *arguments)

    def _write_part(self, *arguments: Any) -> Summary:
        self._pace.begin()
        return writer.write_part(*arguments, rest=self._pace.rest)

    def close(self) -> None:
        """Do not wait for running work; a part that is being written is abandoned."""
        self._pace.end()
        for pool in (self._urgent, self._writing):
            pool.shutdown(wait=False, cancel_futures=True)


def lower_priority() -> None:
    """Of the calling thread and the threads it starts, on systems where threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
