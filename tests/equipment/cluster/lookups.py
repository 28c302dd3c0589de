"""Lookups of rows without a stream."""

from __future__ import annotations

import asyncio

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.wire.messages import LookupEnd, LookupRequest
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.data_plane.lookups import OpenLookup


async def lookup(pserver: BlockServer, request: LookupRequest, payload: memoryview) -> memoryview | LookupEnd:
    """Rows, or why there are none. Raises as OpenLookup."""
    pserver.check(request)
    woken = asyncio.Event()
    opened = OpenLookup(pserver, request, payload, woken.set)
    try:
        while (found := opened.answer()) is None:
            await event_within(woken, opened.deadline - clock.monotonic())
            woken.clear()
        return found if isinstance(found, LookupEnd) else found[0]
    finally:
        opened.close()
