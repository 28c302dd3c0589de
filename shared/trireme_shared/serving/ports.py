"""What a server of blocks is given: by its process at construction, and by the process as a member of its job
later. The loops of embedding tables are compiled before rows are made in it (tables/first_use.py)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trireme_shared.blocks.buffers import Allocate
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.service import settled
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart, InitHeader
from trireme_shared.serving.core.calls import Payload
from trireme_shared.serving.core.table.stepping import RowsServer, RowSteps, StepsAtOnce

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba


async def compile_in_thread(layout: Layout) -> None:
    """In a thread of the same priority: it has the interpreter's lock for much of the time."""
    if layout.tables:
        await asyncio.to_thread(_compile)


async def compile_when_used(_layout: Layout) -> None:
    """Where nobody waits for the event loop meanwhile."""


def _compile() -> None:
    # numba takes a second to be loaded
    from trireme_shared.tables.first_use import compile_loops  # noqa: PLC0415

    compile_loops()
    gc.collect()
    settled()  # numba's objects, too


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """What its process gives a server of blocks."""

    #: makes the allocator of one store's memory; None: memory of this process alone
    allocate: Callable[[], Allocate] | None = None
    #: how long a pull may wait at most, in seconds
    max_wait_s: float = 60.0
    #: makes the part that steps the rows of embedding tables: in one go, or in turns with everything else
    #: (data_plane/row_turns.py)
    row_steps: Callable[[RowsServer], RowSteps] = StepsAtOnce
    #: awaited before rows of tables are made for a job of this layout
    prepare_tables: Callable[[Layout], Awaitable[None]] = compile_when_used
    #: seconds of a clock that only goes forward
    now: Callable[[], float] = clock.monotonic


class OwnPlace(Protocol):
    """The key of the server's process in etcd (shared/trireme_shared/platform/membership/directory.py)."""

    @property
    def in_doubt(self) -> bool:
        """Whether the key may be another process's by now."""
        ...

    def set(self, **fields: Any) -> None:
        """Change the record that the key has."""
        ...


class StartRows(Protocol):
    """Reads the rows that the tables of a job begin with."""

    async def rows(self, header: InitHeader) -> TableRows | None:
        """None: each row begins with its initial values. Raises InvalidArgument, NotReady."""
        ...


class TakesHandoffs(Protocol):
    """Takes blocks of other parameter servers."""

    async def take(
        self, header: HandoffHeader, parts: AsyncIterator[tuple[HandoffPart, Payload]]
    ) -> HandoffAnswer:
        """Raises NotReady: send the parts again; BadFrame."""
        ...
