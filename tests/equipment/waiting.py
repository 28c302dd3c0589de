"""Waiting for what a test expects, on the clock of whatever loop runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Raises AssertionError if `condition()` does not become true in time."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {limit_s} s for {what}") from None
