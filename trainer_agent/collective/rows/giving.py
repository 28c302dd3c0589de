"""A trainer gives the rows of its embedding tables to one that joins, while it trains: those of one version.

asked with a new token ─► snapshots of all tables, steps go on ─► portion 0, 1, 2, ... each once ─► the last one: closed
                                        `─ nobody asks for IDLE_S: closed; the joiner begins anew, with another token
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_128

from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.messages import Portion, RowsHead, StateHead, StatePart, StateRequest
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import InvalidArgument, NotReady
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.snapshot import TableSnapshot

IDLE_S = 20.0
MARGIN_S = 0.1  # clocks of event loops may be a moment ahead
PART_BYTES = 1 << 20  # at least one record
SHARE = 0.25  # of the time
MOST_OPEN = 4
ROWS_PART, SKETCH_PART = "rows", "sketch"

Parts = list[tuple[StatePart, memoryview]]

log = telemetry.logger("collective.rows")


@dataclass(slots=True, eq=False)
class _Open:
    """`following`: the number of the next portion. `timeline`: of what it gives."""

    record: StepRecord
    timeline: int
    tables: list[TableSnapshot]
    portions: Iterator[Parts]
    asked: float
    following: int = 0
    busy: bool = False

    def close(self) -> None:
        for table in self.tables:
            table.close()


class RowsGiver:
    """Of one trainer. `step_in`: a thread, in which nothing else is stepped meanwhile."""

    def __init__(self, replica: Replica, step_in: Callable[..., Awaitable[Any]]) -> None:
        self._replica, self._step_in = replica, step_in
        self._open: dict[str, _Open] = {}
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    def __repr__(self) -> str:
        return f"<RowsGiver to {len(self._open)} trainers>"

    async def give(self, request: StateRequest) -> Portion:
        """The next portion; the first one while nothing is being stepped. Raises NotReady: begin anew, with another token or another trainer."""
        async with self._turn:
            if (pause_s := self._free_at - clock.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            self._close_idle()
            found = self._open.get(request.rows)
            if found is None and request.portion == 0:
                found = self._begin(request.rows)
            if found is None or found.following != request.portion or found.timeline != request.timeline:
                raise NotReady(f"portion {request.portion} of rows is not there any more: begin anew")
            found.following += 1
            found.busy = True
            began = clock.monotonic()
            try:
                parts: Parts | None = await self._step_in(next, found.portions, None)
            except InvalidArgument as error:  # steps kept too many rows for it
                self._end(request.rows)
                raise NotReady(f"these rows are not kept any more: {error.message}") from error
            finally:
                found.busy, found.asked = False, clock.monotonic()
                asyncio.get_running_loop().call_later(IDLE_S + MARGIN_S, self._close_idle)
            self._free_at = clock.monotonic() + (clock.monotonic() - began) * (1 / SHARE - 1)
            if parts is None:
                self._end(request.rows)
            updates = tuple(table.updates for table in found.tables)
            return Portion(
                StateHead(record=found.record, rows=RowsHead(updates=updates, last=parts is None)), parts or []
            )

    def close(self) -> None:
        for token in list(self._open):
            self._end(token)

    def _begin(self, token: str) -> _Open:
        rows, record = self._replica.rows, self._replica.record
        if rows is None or record is None or not self._replica.at_rest or rows.version != record.version:
            raise NotReady("this trainer has no version of its rows at this moment: ask again")
        if len(self._open) >= MOST_OPEN:
            raise NotReady(f"{len(self._open)} trainers get rows already: ask another, or again")
        tables = rows.copies()
        found = _Open(record, self._replica.timeline, tables, _portions(tables), clock.monotonic())
        self._open[token] = found
        return found

    def _close_idle(self) -> None:
        for token, each in list(self._open.items()):
            if not each.busy and clock.monotonic() - each.asked > IDLE_S:
                self._end(token)

    def _end(self, token: str) -> None:
        if (found := self._open.pop(token, None)) is not None:
            found.close()


def _portions(tables: list[TableSnapshot]) -> Iterator[Parts]:
    for number, table in enumerate(tables):
        for group in table.groups():
            records, _ = table.records(group)
            yield _parts(f"{number}.{ROWS_PART}", records)
        yield _parts(f"{number}.{SKETCH_PART}", table.sketch_rows())


def _parts(name: str, records: Numbers) -> Parts:
    """Copies."""
    at_once, found = max(1, PART_BYTES // (8 * records.shape[1])), []
    for first in range(0, len(records), at_once):
        payload = memoryview(np.ascontiguousarray(records[first : first + at_once]).tobytes())
        digest = xxh3_128(payload).hexdigest()
        found.append((StatePart(block=ROWS, name=name, dtype="int64", digest=digest), payload))
    return found
