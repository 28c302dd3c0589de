"""A trainer that joins gets the rows of all embedding tables at one version from one other trainer, and makes the steps since then.

donor ─portions─► rows of version v, all of them ─┐
mean gradients of rows of each version, kept ─────┴─► stepped to the version that is followed
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_128

from trainer_agent.collective.rows.giving import ROWS_PART, SKETCH_PART
from trainer_agent.collective.rows.means import RowMeans
from trainer_agent.collective.rows.stepping import ReplicaRows, new_rows, step_rows
from trainer_agent.collective.state.messages import Portion
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import BadFrame, Gone, NotReady, PeerError, StaleGeneration
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import LaneZero, StepRecord
from trireme_shared.tables.snapshot import from_records, record_words

KEPT_BYTES = 1 << 30  # of mean gradients of rows
PAUSE_S = 0.2
TRIES = 3

Ask = Callable[[int, str, int], Awaitable[Portion]]
"""Donor's number, token, number of the portion."""

log = telemetry.logger("collective.rows")


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    means: RowMeans
    lane_zero: LaneZero | None


class JoiningRows:
    """`rows`: None until they are all there; then at a version that `step` brings to the newest that was noted. `compare(record)`: see CatchingUp."""

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
            raise Gone(f"versions pass faster than rows come: {self._bytes} bytes of their gradients were kept")
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
        """All rows, from one of so many donors, and the steps since. Raises NotReady: none gives them; Gone."""
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
