"""Waiting with a limit, and saying now and then what is waited for."""

from __future__ import annotations

import asyncio

FIRST_NOTICE_S = 10.0
RAREST_NOTICE_S = 600.0


async def event_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Whether the event is set within `limit_s` (None: it is waited for as long as it takes)."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False


class Notices:
    """When to tell of something that lasts: at first, after FIRST_NOTICE_S, and then each time twice as late as before, but at least
    every RAREST_NOTICE_S."""

    def __init__(self) -> None:
        self._next: float | None = None
        self._pause_s = FIRST_NOTICE_S

    def due(self, now: float) -> bool:
        """It still lasts: whether to tell now."""
        if self._next is not None and now < self._next:
            return False
        self._pause_s = FIRST_NOTICE_S if self._next is None else min(2 * self._pause_s, RAREST_NOTICE_S)
        self._next = now + self._pause_s
        return True

    def over(self) -> bool:
        """It is over: whether it was told of."""
        told, self._next = self._next is not None, None
        return told
