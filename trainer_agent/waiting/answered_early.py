"""Leave a block of code as soon as something is known that makes the rest of it pointless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.runtime import clock


@asynccontextmanager
async def until(answer: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Run the block, but leave it as soon as `answer` is there, wherever it waits."""
    inside = True
    try:
        async with asyncio.timeout(None) as limit:

            def leave(_: object) -> None:
                if inside:
                    limit.reschedule(clock.monotonic())

            answer.add_done_callback(leave)
            try:
                yield
            finally:
                inside = False
                answer.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise
