"""The end of a push: blocks may wait for their siblings in the memory of who sent them, but not for long."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.serving.core.pushes import OpenPush
from trireme_shared.serving.transport.stream import BURST_BYTES

# From a push's end until its blocks are copied. Trainers that are about equally fast need no copies; one that is faster has to know that its lanes are
# acknowledged before it computes those of others.
LENT_S = 0.02


async def settled(pushing: OpenPush, changed: asyncio.Event, limit_s: float) -> bool:
    """Wait until nothing of the push is `waiting`. Return False if something did not move for `limit_s`. `changed` is set when less of it waits."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LENT_S):
            while pushing.waiting:
                changed.clear()
                await changed.wait()
    while pushing.keep_some(BURST_BYTES):  # noqa: ASYNC110  other tasks have their turns
        await asyncio.sleep(0)
    while pushing.waiting:
        changed.clear()
        if not await event_within(changed, limit_s):
            return False
    return True
