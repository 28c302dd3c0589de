"""Requests for a task that wait in the master until there may be one for them.

nothing to give ─► next(): in line ─► freed(n): the first n look again │ changed(): all do │ the limit is over: "wait" is answered
"""

from __future__ import annotations

import asyncio


class WaitingAsks:
    """`changes` counts what may have made tasks: who finds none after looking at it misses nothing by `next(changes, ...)`."""

    def __init__(self) -> None:
        self.changes = 0
        self._line: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def freed(self, tasks: int) -> None:
        """So many tasks were put back: each takes one of the line along."""
        self.changes += 1
        for waiting in list(self._line)[:tasks] if tasks < len(self._line) else [*self._line]:
            self._wake(waiting)

    def changed(self) -> None:
        """There may be tasks for any number of them, or another answer than to wait."""
        self.freed(len(self._line))

    async def next(self, changes: int, limit_s: float) -> bool:
        """Whether to look again: something came after `changes`, within `limit_s`. Who then takes nothing passes it on (`freed(1)`)."""
        if self.changes != changes:
            return True
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[waiting] = None
        try:
            async with asyncio.timeout(limit_s):
                await waiting
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.freed(1)
            raise
        finally:
            self._line.pop(waiting, None)
        return True

    def _wake(self, waiting: asyncio.Future[None]) -> None:
        self._line.pop(waiting, None)
        if not waiting.done():
            waiting.set_result(None)
