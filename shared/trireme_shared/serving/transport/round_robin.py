"""Work of several connections shares the event loop: one piece of work in each turn of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class RoundRobin:
    """Calls what was asked for in order, one call in each turn of the event loop. Work that is not finished asks again."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<RoundRobin: {len(self._waiting)} wait>"

    def ask(self, work: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(work)

    def _next(self) -> None:
        work = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        work()
