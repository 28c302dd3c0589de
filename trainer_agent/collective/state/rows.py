"""Rows of embedding tables from a trainer that trains to one that joins: all at one version, and the steps
that were made since then.

    RowsGiver     asked with a new token ─► snapshots of all tables, steps go on
                      ─► portion 0, 1, 2, ... each once ─► the last one: closed
                         `─ nobody asks for IDLE_S: closed; the joiner begins anew, with another token
    JoiningRows   portions ─► rows of version v, all of them ─┐
                  mean gradients of rows of each version, kept ┴─► stepped to the version that is followed

This module loads numba, so it is imported only where there are tables.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_128

from trainer_agent.collective.replica import Replica
from trainer_agent.collective.rows import ReplicaRows, RowMeans, new_rows, step_rows
from trainer_agent.collective.state.messages import Portion, RowsHead, StateHead, StatePart, StateRequest
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import (
    BadFrame,
    Gone,
    InvalidArgument,
    NotReady,
    PeerError,
    StaleGeneration,
)
from trireme_shared.protocol.records.layout import ROWS, Layout
from trireme_shared.protocol.records.step import LaneZero, StepRecord
from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.snapshot import TableSnapshot, from_records, record_words

IDLE_S = 20.0
MARGIN_S = 0.1  # clocks of event loops may be a moment ahead
PART_BYTES = 1 << 20  # at least one record
SHARE = 0.25  # of the time
MOST_OPEN = 4
ROWS_PART, SKETCH_PART = "rows", "sketch"
Parts = list[tuple[StatePart, memoryview]]
KEPT_BYTES = 1 << 30  # of mean gradients of rows
PAUSE_S = 0.2
TRIES = 3
Ask = Callable[[int, str, int], Awaitable[Portion]]
"""Donor's number, token, number of the portion."""
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
        """The next portion; the first one while nothing is being stepped. Raises NotReady: begin anew, with
        another token or another trainer."""
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
                StateHead(record=found.record, rows=RowsHead(updates=updates, last=parts is None)),
                parts or [],
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


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    means: RowMeans
    lane_zero: LaneZero | None


class JoiningRows:
    """`rows`: None until they are all there; then at a version that `step` brings to the newest that was
    noted. `compare(record)`: see CatchingUp."""

    def __init__(self, layout: Layout, compare: Callable[[StepRecord], None]) -> None:
        self._layout, self._compare = layout, compare
        self.rows: ReplicaRows | None = None
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._stepping = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<JoiningRows {self.rows!r}, {len(self._kept)} steps kept>"

    def are_at(self, version: int) -> bool:
        return self.rows is not None and not self._stepping.locked() and self.rows.version == version

    async def note(self, record: StepRecord, means: RowMeans) -> None:
        """The next version. Raises Gone: too much would have to be kept."""
        self._kept.append(_Kept(record.version, means, record.lane_zero))
        self._bytes += means.bytes
        if self._bytes > KEPT_BYTES:
            raise Gone(
                f"versions pass faster than rows come: {self._bytes} bytes of their gradients were kept"
            )
        await self.step()

    async def step(self) -> None:
        """What is kept, if the rows are there."""
        async with self._stepping:
            while self.rows is not None and self._kept:
                kept = self._kept.popleft()
                self._bytes -= kept.means.bytes
                if kept.version > self.rows.version:
                    assert kept.version == self.rows.version + 1, (kept.version, self.rows)
                    await step_rows(self.rows, kept.means, kept.lane_zero)

    async def fetch(self, donors: int, ask: Ask) -> None:
        """All rows, from one of so many donors, and the steps since. Raises NotReady: none gives them;
        Gone."""
        problem: object = ""
        for attempt in range(TRIES * donors):
            try:
                self.rows = await self._fetched(attempt % donors, ask)
            except (PeerError, StaleGeneration, BadFrame) as error:
                problem = error
                log.warning("rows_not_given", donor=attempt % donors, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
            else:
                await self.step()
                return
        raise NotReady(f"none of {donors} trainers gives its rows: {problem}")

    async def _fetched(self, donor: int, ask: Ask) -> ReplicaRows:
        token, number = ids.new_id("rows"), 0
        portion = await ask(donor, token, number)
        record = portion.head.record
        self._compare(record)
        rows = new_rows(self._layout, record.version)
        while True:
            head = portion.head.rows
            if head is None or len(head.updates) != len(rows.tables):
                raise BadFrame("rows were asked for, and none came")
            _take(rows, portion)
            if head.last:
                for table, updates in zip(rows.tables, head.updates, strict=True):
                    table.updates = updates
                return rows
            number += 1
            portion = await ask(donor, token, number)


def _take(rows: ReplicaRows, portion: Portion) -> None:
    """Put the rows of whole slots into the tables. Raises BadFrame."""
    found: dict[tuple[int, str], list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]] = {}
    for part, payload in portion.parts:
        if xxh3_128(payload).hexdigest() != part.digest:
            raise BadFrame(f"rows ({part.name}) were damaged on their way")
        number, _, what = part.name.partition(".")
        if not number.isascii() or not number.isdigit() or int(number) >= len(rows.tables):
            raise BadFrame(f"rows came as {part.name!r}: the model has {len(rows.tables)} tables")
        table = rows.tables[int(number)]
        words = record_words(table.width)
        if what == SKETCH_PART and table.sketch is not None:
            words = 1 + table.sketch.shape[1] // 8
        elif what != ROWS_PART:
            raise BadFrame(f"rows came as {part.name!r}, which is no part of table {table.spec.name}")
        if payload.nbytes % (8 * words):
            raise BadFrame(f"{payload.nbytes} bytes of {part.name!r}: expected records of {8 * words}")
        found.setdefault((int(number), what), []).append(np.frombuffer(payload, np.int64).reshape(-1, words))
    for (place, what), records in found.items():
        table, whole = rows.tables[place], np.concatenate(records)
        if what == ROWS_PART:
            table.put_rows(from_records(whole, table.width))
        else:
            table.put_sketch(whole[:, 0].copy(), np.ascontiguousarray(whole[:, 1:]).view(np.uint8))
