"""Work of several connections that must not keep the event loop from others: a piece of one of them in a turn of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class RoundRobin:
    """Who waits is called in the order in which they asked, one in each turn of the event loop, and asks again if more is left."""

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
