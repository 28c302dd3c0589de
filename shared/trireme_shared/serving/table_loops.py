"""The loops of embedding tables are compiled before rows are made here (shared/trireme_shared/tables/first_use.py), while the event loop goes on."""

from __future__ import annotations

import asyncio
import gc

from trireme_shared.platform.runtime.service import settled
from trireme_shared.protocol.records.layout import Layout


async def compile_in_thread(layout: Layout) -> None:
    """In a thread of the same priority: it has the interpreter's lock for much of the time."""
    if layout.tables:
        await asyncio.to_thread(_compile)


async def compile_when_used(_layout: Layout) -> None:
    """Where nobody waits for the event loop meanwhile."""


def _compile() -> None:
    from trireme_shared.tables.first_use import compile_loops  # noqa: PLC0415  numba takes a second to be loaded

    compile_loops()
    gc.collect()
    settled()  # numba's objects, too
