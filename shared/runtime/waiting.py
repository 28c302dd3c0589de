"""Waiting with a limit."""

from __future__ import annotations

import asyncio


async def event_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Whether the event is set within `limit_s` (None: it is waited for as long as it takes)."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False
