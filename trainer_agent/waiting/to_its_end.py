"""Work that has to end before anything else happens, whatever happens to who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """What it returns. If cancelled, that is raised when the work has ended: a thread, for example, that writes to memory of others."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
