"""Leave a block of code as soon as a future is done that makes the rest of the block pointless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.runtime import clock


@asynccontextmanager
async def leave_when_done(future: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Run the block, but leave it as soon as `future` is done, wherever the block waits."""
    inside = True
    try:
        async with asyncio.timeout(None) as limit:

            def leave(_: object) -> None:
                if inside:
                    limit.reschedule(clock.monotonic())

            future.add_done_callback(leave)
            try:
                yield
            finally:
                inside = False
                future.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise
