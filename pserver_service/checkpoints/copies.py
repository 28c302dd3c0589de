"""Asynchronous: copies of what one parameter server has, with blocks, rows and ledger of one instant.

a push that is being stepped is whole ─► rows and ledger copied, before the next one begins ─► blocks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.core.ledger import AsyncSnapshot
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.pserver import Pserver

COPY_BYTES = 4 << 20  # of values, with their optimizer's state: a few milliseconds

log = telemetry.logger("pserver.copies")


async def copy(pserver: Pserver, record: StepRecord, generation: int, goes_on: Callable[[int], bool]) -> bool:
    """Copy everything for a checkpoint, some blocks at a time. Pushes of lower generations are stale from now on.

    `goes_on(blocks)` is asked in between, with the number of blocks that are copied. False: it did not go on, a rollback or an
    update came in between, and nothing is kept."""
    pserver.generation = max(pserver.generation, generation)
    store = pserver.store
    if store is None or not store.numbers:
        return True
    assert isinstance(store, AsyncStore)
    copying = await begin(pserver, store, lambda: store.begin_copy(record))
    if copying is None:
        return False
    kept = False
    try:
        copied_bytes = 0
        for done, number in enumerate(number for number in copying.blocks if number != ROWS):
            if copied_bytes >= COPY_BYTES:
                copied_bytes = 0
                await asyncio.sleep(0)
                if pserver.store is not store or not goes_on(done):
                    return False
            store.copy_block(copying, number)
            copied_bytes += store.blocks[number].place.bytes
        kept = store.keep_copy(copying)
    finally:
        if not kept:
            copying.release()
    pserver.look_for_snapshot()
    return kept


async def begin(pserver: Pserver, store: Store, make: Callable[[], AsyncSnapshot]) -> AsyncSnapshot | None:
    """What `make` makes when no push of rows is half applied: a push is whole within tens of milliseconds. None: the store was dropped meanwhile."""
    made: asyncio.Future[AsyncSnapshot | None] = asyncio.get_running_loop().create_future()

    def now() -> None:
        if made.done():  # nobody waits any more
            return
        try:
            made.set_result(make() if pserver.store is store else None)
        except Exception as error:
            log.exception("not_copied", index=pserver.index)
            made.set_exception(error)

    pserver.row_steps.between_pushes(now)
    return await made
