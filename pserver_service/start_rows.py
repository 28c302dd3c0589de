"""Rows that a job's tables start with (`init_from`) are read here, each parameter server those of its own
slots, before it takes the first parameters.

init --rows(header)--> NOT_READY, and they are read in the background ... the trainer sends init again
    --rows(header)--> the rows
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pserver_service.context import PserverContext
from trireme_shared.checkpoints.start_tables import fit_tables, mark_in, put_rows
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import InvalidArgument, NotReady, TriremeError
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.wire.messages import InitHeader
from trireme_shared.serving.core.stores import rows_of
from trireme_shared.tables.hashing import owned_slots

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

WAIT_S = 5.0  # of one request; the trainer asks again

log = telemetry.logger("pserver.start_rows")


@dataclass(slots=True, eq=False)
class _Reading:
    """Of `header.layout`, for the slots of parameter server `header.pserver` in `slots`. `done`: one of the
    last two is set."""

    header: InitHeader
    slots: SlotMap
    done: asyncio.Event
    rows: TableRows | None = None
    error: Exception | None = None

    def is_for(self, header: InitHeader, slots: SlotMap | None) -> bool:
        mine = (self.header.layout, self.header.pserver, self.header.mode, self.header.lanes, self.slots)
        return mine == (header.layout, header.pserver, header.mode, header.lanes, slots)


class StartRowsReader:
    """`run` beside `rows`, which is Pserver.start_rows. What was read is given once."""

    def __init__(self, context: PserverContext) -> None:
        self._context = context
        self._reading: _Reading | None = None
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            if (reading := self._reading) is None or reading.done.is_set():
                continue
            began, spec = clock.monotonic(), self._context.spec
            place = (reading.header, reading.slots, spec.init_from, spec.init_optimizer)
            try:
                reading.rows = await self._context.offload(read_start_rows, *place)
            except Exception as error:  # noqa: BLE001  also of a storage's library: whoever asked is told
                reading.error = error
            seconds = round(clock.monotonic() - began, 1)
            log.info("start_rows_read", rows=repr(reading.rows), seconds=seconds, error=repr(reading.error))
            reading.done.set()

    async def rows(self, header: InitHeader) -> TableRows | None:
        """Raises InvalidArgument: the files are not those that the trainer saw; NotReady: ask again."""
        if not mark_in(header.layout.initial):
            return None
        slots = self._context.directory.slots
        if slots is None:
            raise NotReady(f"pserver-{header.pserver} has no slot map yet: send the parameters again")
        if (reading := self._reading) is None or not reading.is_for(header, slots):
            reading = self._reading = _Reading(header, slots, asyncio.Event())
            self._asked.set()
        await event_within(reading.done, WAIT_S)
        if not reading.done.is_set():
            msg = (
                f"pserver-{header.pserver} reads the rows that tables start with from beside "
                f"{self._context.spec.init_from}"
            )
            raise NotReady(msg, hint="it takes as long as reading these files; ask again")
        self._reading = None
        if reading.error is None:
            return reading.rows
        if isinstance(reading.error, TriremeError):
            raise reading.error
        msg = f"pserver-{header.pserver} cannot read the rows that tables start with: {reading.error!r}"
        raise NotReady(msg, hint="every member must see the files beside init_from") from reading.error


def read_start_rows(header: InitHeader, slots: SlotMap, init_from: str | None, states: bool) -> TableRows:
    """Blocks. Raises InvalidArgument: the files are others than the trainer that begins the job saw;
    OSError."""
    made, mark = rows_of(header), mark_in(header.layout.initial)
    assert made is not None
    fit = fit_tables(header.layout.tables, init_from or "", states=states)
    here = fit.mark()
    if here != mark:
        msg = (
            f"the tables beside {init_from} are not the same for pserver-{header.pserver} as for "
            f"the trainer that begins the job (mark {here or 'none'}, "
            f"the job has {mark}): they were changed meanwhile, or one of the two sees other files"
        )
        hint = "all members must see the same files; start a new job for new ones"
        raise InvalidArgument(msg, hint=hint, fatal=True)  # trying again does not help
    tables, own = {table.spec.name: table for table in made.tables}, owned_slots(slots.owners, header.pserver)
    for start in fit.tables:
        put_rows(tables[start.name], start, own)
    return made
