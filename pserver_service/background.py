"""Threads for what blocks: a part of a checkpoint is written behind training, the rest is waited for.

write_part -> one thread of the lowest priority (and the threads it starts)        load, write_manifest, remove -> the others
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pserver_service import disk

THREADS = 2  # a commit, a checkpoint being loaded
NICENESS = 19  # the lowest: whatever training leaves, and a seventieth of a core that it wants all of


class Background:
    """Call it to run a blocking function: `await background(function, *arguments)`. Close it at the end."""

    def __init__(self) -> None:
        self._waited_for = ThreadPoolExecutor(THREADS, "checkpoints")
        self._behind = ThreadPoolExecutor(1, "write", initializer=lower_priority)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = self._behind if function is disk.write_part else self._waited_for
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def close(self) -> None:
        """Nobody waits for what is under way."""
        for pool in (self._waited_for, self._behind):
            pool.shutdown(wait=False, cancel_futures=True)


def lower_priority() -> None:
    """Of the calling thread and of those it starts, where the system can do that for a thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
