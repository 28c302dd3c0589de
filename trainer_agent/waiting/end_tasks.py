"""The end of tasks that were cancelled, also of those that forget it.

Until Python 3.13 a TaskGroup that is cancelled forgets it if one of its tasks fails at that moment: the error is raised in place of
CancelledError, and who handles it goes on. A trainer of a job that has failed then reported its own error to a master that was gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, again and again until they have ended. What they raise stays with them."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
