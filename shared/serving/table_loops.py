"""What is done before rows of embedding tables are made here: their loops are compiled (shared/tables/first_use.py), and rows that they start with are
read (recovery/start_rows.py), while the event loop goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from shared.checkpoints.start_tables import mark_in
from shared.errors import NotReady
from shared.records.layout import Layout
from shared.runtime.service import settled
from shared.wire.messages import InitHeader

if TYPE_CHECKING:
    from shared.serving.core.table.rows import TableRows  # loads numba

PrepareTables = Callable[[Layout], Awaitable[None]]
"""Awaited before rows of tables are made for a job of this layout."""
StartRows: TypeAlias = "Callable[[InitHeader], Awaitable[TableRows | None]]"
"""Gives the rows with which the tables of a job begin; None: each row begins with its initial values. Raises InvalidArgument, NotReady."""


async def compile_in_thread(layout: Layout) -> None:
    """In a thread of the same priority: it has the interpreter's lock for much of the time."""
    if layout.tables:
        await asyncio.to_thread(_compile)


async def compile_when_used(_layout: Layout) -> None:
    """Where nobody waits for the event loop meanwhile."""


async def no_rows_yet(header: InitHeader) -> TableRows | None:
    """While no index is claimed: it is not known which rows are its own."""
    if mark_in(header.layout.initial):
        raise NotReady(f"pserver-{header.pserver} has no index yet: send the parameters again")
    return None


def _compile() -> None:
    from shared.tables.first_use import compile_loops  # noqa: PLC0415  numba takes a second to be loaded

    compile_loops()
    gc.collect()
    settled()  # numba's objects, too
