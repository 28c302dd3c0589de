"""Threads for what blocks: a part of a checkpoint is written behind training, the rest is waited for.

write_part -> one thread of the lowest priority, which rests as it goes        load, write_manifest, remove -> the others
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared.checkpoints import writer
from shared.runtime import clock
from shared.storage.tensor_file import Summary

Offload = Callable[..., Awaitable[Any]]
"""`await offload(function, *arguments)`: run it where blocking does no harm."""

THREADS = 2  # a commit, a checkpoint being loaded
NICENESS = 19  # the lowest: whatever training leaves, and a seventieth of a core that it wants all of
REST = 0.5  # of the time it worked: what a written byte takes of the memory's bandwidth is spread over more steps
WORK_S = 1e-3  # at least, between two rests


class Abandoned(OSError):
    """This process leaves: what was being written is not there."""


class Pace:
    """What the thread that writes does between two chunks. `hurried()`: somebody waits for it, so it does not rest.

    Rests follow the processor time of the thread, not the time it waited for a disk or a network: that costs training nothing.
    """

    def __init__(self, hurried: Callable[[], bool]) -> None:
        self._hurried = hurried
        self._ended = threading.Event()
        self._since = 0.0

    def begin(self) -> None:
        """In the thread that will write."""
        self._since = clock.thread_seconds()

    def rest(self) -> None:
        """Raises Abandoned if `end` was called."""
        worked = clock.thread_seconds() - self._since
        if worked < WORK_S and not self._ended.is_set():
            return
        if self._ended.wait(0.0 if self._hurried() else worked * REST):
            raise Abandoned("this process leaves")
        self._since = clock.thread_seconds()

    def end(self) -> None:
        self._ended.set()


class Background:
    """Call it to run a blocking function: `await background(function, *arguments)`. Close it at the end."""

    def __init__(self, hurried: Callable[[], bool] = lambda: False) -> None:
        self._pace = Pace(hurried)
        self._waited_for = ThreadPoolExecutor(THREADS, "checkpoints")
        self._behind = ThreadPoolExecutor(1, "write", initializer=lower_priority)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        if function is writer.write_part:
            return await loop.run_in_executor(self._behind, self._write_part, *arguments)
        return await loop.run_in_executor(self._waited_for, function, *arguments)

    def _write_part(self, *arguments: Any) -> Summary:
        self._pace.begin()
        return writer.write_part(*arguments, rest=self._pace.rest)

    def close(self) -> None:
        """Nobody waits for what is under way; a part that is being written is given up."""
        self._pace.end()
        for pool in (self._waited_for, self._behind):
            pool.shutdown(wait=False, cancel_futures=True)


def lower_priority() -> None:
    """Of the calling thread and of those it starts, where the system can do that for a thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
