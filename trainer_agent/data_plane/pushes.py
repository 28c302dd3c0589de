"""Pushes to all processes that serve blocks: an outbox and one stream a process, sent again until it is
acknowledged or no longer needed.

backward finishes a block ──NodeSink──► outbox of the block's owner ──► PushAnswer ──verdict──►
    ACKNOWLEDGED │ MOVED, AGAIN: pushed again │ BEHIND, STALE generation, FENCED attempt │ BROKEN: an error
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer_agent.data_plane.fleet_client import FleetClient, Routes
from trainer_agent.data_plane.row_lookups import RowPart, RowRouter
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.protocol.errors import (
    NotReady,
    PeerError,
    StaleAttempt,
    StaleGeneration,
    TooEarly,
    TriremeError,
    WrongOwner,
)
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PushAnswer, PushBlock, PushHeader

if TYPE_CHECKING:
    from trireme_shared.tables.lanes import LaneRows  # loads numba

MOVING = "MOVING"  # of a block that is on its way to another parameter server


@dataclass(frozen=True, slots=True)
class PushedRows:
    """A lane's gradients of rows of embedding tables. `rows`: of each table. `count`: the lane's records.
    `result` (synchronous): the rows of all lanes may be there, and be stepped, before a block of each is.
    `versions` (asynchronous): the rows that the gradients were computed from, by slot map version and
    parameter server."""

    rows: Sequence[LaneRows]
    count: int
    result: NodeResult | None = None
    versions: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def head(self, lane: int, index: int, part: RowPart, slots: int) -> PushBlock:
        """Of the part of parameter server `index` by slot map `slots`."""
        return PushBlock.model_construct(
            block=ROWS,
            lanes=(lane, lane + 1),
            count=self.count,
            dtype=part.dtype,
            result=self.result,
            rows=part.counts,
            slots=slots,
            version=self.versions.get((slots, index)),
        )


@lru_cache(1 << 14)
def _head(block: int, lanes: Interval, count: int, dtype: Narrow | None, version: int | None) -> PushBlock:
    """Those of most steps are equal."""
    return PushBlock.model_construct(block=block, lanes=lanes, count=count, dtype=dtype, version=version)


class Outbox:
    """The blocks for one parameter server, in the order they were finished; may be read again from the start.
    `first`: the lanes whose data it got from this trainer first, as it said last. `rows`: the gradients of
    rows of all parameter servers, by lane: some may go to others than they were meant for."""

    def __init__(self, rows: Mapping[int, PushedRows] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self._items: list[tuple[PushBlock, memoryview]] = []
        self._closed = False
        self.first: tuple[int, ...] = ()
        self._more = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, block: PushBlock, payload: memoryview) -> None:
        self._items.append((block, payload))
        self._more.set()

    def close(self) -> None:
        self._closed = True
        self._more.set()

    @property
    def is_closed(self) -> bool:
        """Whether all blocks are there; before, backward goes on."""
        return self._closed

    async def items(self) -> list[tuple[PushBlock, memoryview]]:
        """All blocks, once they are there."""
        await self.at(sys.maxsize)
        return list(self._items)

    @classmethod
    def of(
        cls, items: Iterable[tuple[PushBlock, memoryview]], rows: Mapping[int, PushedRows] | None = None
    ) -> Outbox:
        """With all its blocks."""
        outbox = cls(rows)
        outbox._items, outbox._closed = list(items), True
        return outbox

    @classmethod
    def part(
        cls,
        items: Iterable[tuple[PushBlock, memoryview]],
        whole: Iterable[tuple[PushBlock, memoryview]],
        rows: Mapping[int, PushedRows] | None = None,
    ) -> Outbox:
        """Some of the blocks in `whole`, for another parameter server: it needs the results of their lanes,
        too."""
        results = {block.lanes: block.result for block, _ in whole if block.result is not None}
        found = []
        for block, payload in items:
            result = results.pop(block.lanes, None)
            found.append((block if result is None else block.with_fields(result=result), payload))
        return cls.of(found, rows)

    async def started(self) -> bool:
        """Wait for the first block; False if there will be none."""
        return await self.at(0) is not None

    def stream(self) -> AsyncIterator[tuple[PushBlock, memoryview]]:
        """All blocks, waiting for those to come.

        No generator: the writer of a failed HTTP request still waits for its next block until it is
        cancelled, and a generator that another task waits for cannot be closed.
        """
        return _Stream(self)

    async def at(self, number: int) -> tuple[PushBlock, memoryview] | None:
        """Wait for a block, by its place in this outbox; None if there will be no such block."""
        while number >= len(self._items):
            if self._closed:
                return None
            self._more.clear()
            await self._more.wait()
        return self._items[number]


class _Stream(AsyncIterator[tuple[PushBlock, memoryview]]):
    """An outbox read from its start."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._read = outbox, 0

    async def __anext__(self) -> tuple[PushBlock, memoryview]:
        found = await self._outbox.at(self._read)
        if found is None:
            raise StopAsyncIteration
        self._read += 1
        return found


class Outboxes(dict[int, Outbox]):
    """One push to all parameter servers, by pserver index. `dtypes[block]`: the narrower dtype in which it
    travels, if any. `version`: of the slot map they were made by. `versions` (asynchronous): of the blocks
    that gradients are computed from."""

    def __init__(
        self, routes: Routes, dtypes: Sequence[Narrow | None], versions: Mapping[int, int] | None = None
    ) -> None:
        self.rows: dict[int, PushedRows] = {}
        super().__init__((index, Outbox(self.rows)) for index in routes.blocks)
        self.routes = routes
        self.version, self.owners, self._dtypes = routes.version, routes.owners, dtypes
        self.blocks = len(dtypes)
        self._versions = {} if versions is None else dict(versions)
        self._rows = 0

    def add(
        self, block: int, lanes: Interval, count: int, result: NodeResult | None, payload: memoryview
    ) -> None:
        """A finished block of `lanes`, which have `count` records together."""
        item = _head(block, lanes, count, self._dtypes[block], self._versions.get(block))
        if result is not None:
            item = item.with_fields(result=result)
        self[self.owners[block]].add(item, payload)

    def add_rows(self, lane: int, pushed: PushedRows, parts: Mapping[int, RowPart]) -> None:
        """A lane's gradients of rows of embedding tables, and by parameter server."""
        self.rows[lane] = pushed
        for index, part in parts.items():
            self[index].add(pushed.head(lane, index, part, self.version), part.payload)
            self._rows += 1

    @property
    def added(self) -> int:
        """How many blocks were added."""
        return sum(len(outbox) for outbox in self.values()) - self._rows

    @property
    def first(self) -> tuple[int, ...]:
        """The lanes whose data came from this trainer first, at one parameter server: the same one for all
        trainers."""
        return self[min(self)].first if self else ()

    def close(self) -> None:
        """No more blocks will come."""
        for outbox in self.values():
            outbox.close()


class NodeSink:
    """A BlockSink: puts each finished block of `node`, a group of lanes, into the outbox of the block's
    owner. To be used in the event loop."""

    def __init__(
        self,
        outboxes: Outboxes,
        node: Interval,
        compute: Compute,
        result: Callable[[], NodeResult] | None = None,
        lanes: Interval | None = None,
    ) -> None:
        """`result`, known by the first of the blocks, goes to each parameter server with the first block for
        it. `lanes`: as which the node is pushed, if not as itself."""
        self._outboxes, self._node, self._compute, self._result = outboxes, node, compute, result
        self._lanes = lanes or node
        self._unaware = set(outboxes) if result is not None else set()
        self._found: NodeResult | None = None

    def done(self, block: int) -> None:
        told, owner = None, self._outboxes.owners[block]
        if self._result is not None and owner in self._unaware:
            self._unaware.remove(owner)
            told = self._found = self._found or self._result()
        count, payload = self._compute.samples(self._node), self._compute.contribution(self._node, block)
        self._outboxes.add(block, self._lanes, count, told, payload)


class Verdict(Enum):
    """From good to bad. SKIPPED: given up, nobody answered. MOVED: another parameter server has some blocks,
    or will have them in a moment. BEHIND: the ledger expects an earlier minibatch."""

    ACKNOWLEDGED = "acknowledged"
    SKIPPED = "skipped"
    MOVED = "moved"
    AGAIN = "again"
    BEHIND = "behind"
    STALE = "stale"
    FENCED = "fenced"
    BROKEN = "broken"


_VERDICTS = {
    StaleGeneration.code: Verdict.STALE,
    StaleAttempt.code: Verdict.FENCED,
    TooEarly.code: Verdict.AGAIN,
    NotReady.code: Verdict.AGAIN,
    WrongOwner.code: Verdict.MOVED,
    MOVING: Verdict.MOVED,
}


_ORDER = {found: place for place, found in enumerate(Verdict)}


class Pushes:
    """Pushes of one trainer. `again`: whether a step begins again in another generation, so that what was
    acknowledged before does not count."""

    def __init__(self, fleet: FleetClient, router: RowRouter, *, again: bool) -> None:
        self._fleet, self._router, self._again = fleet, router, again

    def __repr__(self) -> str:
        return f"<Pushes to {self._fleet!r}>"

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AsyncIterator[dict[int, Verdict]]:
        """Push to all parameter servers while the block of code fills the outboxes. After the block, the dict
        has the verdict of each."""
        verdicts: dict[int, Verdict] = {}
        routes = outboxes.routes if isinstance(outboxes, Outboxes) else None
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(self._push(index, header, box, skip_after_s, routes))
                for index, box in outboxes.items()
            ]
            yield verdicts
        for push in pushes:
            _join(verdicts, push.result())

    async def push(
        self, index: int, header: PushHeader, outbox: Outbox, skip_after_s: float | None = None
    ) -> Verdict:
        """ACKNOWLEDGED: every block. STALE, FENCED: the header's generation or attempt is over.

        In asynchronous mode also BEHIND: the pserver came back from a checkpoint; SKIPPED: it gave no answer
        for `skip_after_s`. Blocks that moved meanwhile are pushed to their new owners.
        """
        return worst((await self._push(index, header, outbox, skip_after_s)).values())

    async def _push(
        self,
        index: int,
        header: PushHeader,
        outbox: Outbox,
        skip_after_s: float | None = None,
        routes: Routes | None = None,
    ) -> dict[int, Verdict]:
        """The verdict of each parameter server that got some of the blocks. `routes`: the slot map that put
        them together."""
        if not await outbox.started():
            return {index: Verdict.ACKNOWLEDGED}
        backoff, refusals = Backoff(f"pushing step {header.step} to pserver-{index}"), 0
        while True:
            await self._fleet.be_certain(backoff)
            if await self._fleet.is_silent(index, skip_after_s):
                return {index: Verdict.SKIPPED}
            try:
                answer = await self._fleet.port(index).push(header, outbox.stream())
            except StaleGeneration:
                return {index: Verdict.STALE}
            except PeerError as error:
                if self._fleet.silence.failed(index, error, skip_after_s):
                    return {index: Verdict.SKIPPED}
                # without a look for news: the failure is what followed from the last ones
                if self._again and self._fleet.generation > header.generation:
                    return {index: Verdict.STALE}
                await self._fleet.suspect(index, error)
                if routes is not None and self._fleet.routes.version != routes.version:
                    return await self._push_again(
                        index, header, outbox, await outbox.items(), routes, skip_after_s
                    )
                problem: object = error
            else:
                self._fleet.silence.answered(index)
                outbox.first = answer.first
                found, problem = verdict(answer, header.mode)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver-{index} refused a push of step {header.step}: {problem}")
                if found is Verdict.MOVED:
                    moved = moved_blocks(answer)
                    everything = await outbox.items()
                    rest = [item for item in everything if item[0].block in moved]
                    refusals += 1
                    before = self._fleet.routes if routes is None else routes
                    await self._fleet.rerouted(before.version, refusals, moving=is_moving(answer))
                    if self._fleet.generation > header.generation:
                        return {index: Verdict.STALE}
                    rows_moved = ROWS in moved and self._fleet.routes.version != before.version
                    if rows_moved or self._fleet.routes.split(moved - {ROWS}).keys() - {index}:
                        more = await self._push_again(
                            index, header, outbox, rest, before, skip_after_s, everything
                        )
                        return _join({index: Verdict.ACKNOWLEDGED}, more)
                    outbox, routes = Outbox.part(rest, everything, outbox.rows), self._fleet.routes
                    backoff.waited(problem)
                    continue
                if found is not Verdict.AGAIN:
                    return {index: found}
            if self._fleet.generation > header.generation:
                return {index: Verdict.STALE}
            if not outbox.is_closed:
                backoff.waited(problem)  # the gradients of a large model may take longer than any time limit
            await backoff.failed(problem)

    async def _push_again(
        self,
        asked: int,
        header: PushHeader,
        outbox: Outbox,
        items: Sequence[tuple[PushBlock, memoryview]],
        before: Routes,
        skip_after_s: float | None,
        everything: Sequence[tuple[PushBlock, memoryview]] = (),
    ) -> dict[int, Verdict]:
        """Blocks of an outbox to their owners by the newest slot map. `everything`: if they are a part of it.
        `before`: the map that put them together. Rows go to all that have other slots now, and to the one
        that was asked, whole lanes: each takes those that it lacks."""
        routes, boxes = self._fleet.routes, dict[int, list[tuple[PushBlock, memoryview]]]()
        for item in items:
            if item[0].block != ROWS:
                boxes.setdefault(routes.owners[item[0].block], []).append(item)
        lacking = {asked, *routes.changed_since(before)}
        for lane in [item.lanes[0] for item, _ in items if item.block == ROWS]:
            pushed = outbox.rows[lane]
            for index, part in self._router.row_parts(routes, pushed.rows).items():
                if index in lacking:
                    boxes.setdefault(index, []).append(
                        (pushed.head(lane, index, part, routes.version), part.payload)
                    )
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(
                    self._push(
                        index,
                        header,
                        Outbox.part(box, everything or items, outbox.rows),
                        skip_after_s,
                        routes,
                    )
                )
                for index, box in sorted(boxes.items())
            ]
        verdicts: dict[int, Verdict] = {}
        for push in pushes:
            _join(verdicts, push.result())
        return verdicts

    async def claim(self, header: PushHeader) -> None:
        """Once this returns, the parameter servers refuse other data of the header's lanes in its step.
        Raises StepTorn if one has such data already (the job will go back to a checkpoint),
        StaleGeneration."""

        async def ask(routes: Routes, index: int) -> object:
            claim = header.with_fields(slots=routes.version)
            return await self._fleet.ask(index, lambda port: port.push(claim, _nothing()), routes=routes)

        await self._fleet.ask_all(ask)


async def _nothing() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
    return
    yield


def _join(verdicts: dict[int, Verdict], more: Mapping[int, Verdict]) -> dict[int, Verdict]:
    """In place: the worst of each parameter server."""
    for index, found in more.items():
        verdicts[index] = worst((verdicts.get(index, Verdict.ACKNOWLEDGED), found))
    return verdicts


def verdict(answer: PushAnswer, mode: Mode) -> tuple[Verdict, str]:
    """The worst that the answer says about any block, with a sentence."""
    found_worst, sentence = Verdict.ACKNOWLEDGED, ""
    for refusal in answer.refused:
        found = _VERDICTS.get(refusal.code, Verdict.BROKEN)
        if mode is Mode.ASYNC and refusal.code == TooEarly.code:
            found = Verdict.BEHIND
        if _ORDER[found] > _ORDER[found_worst]:
            found_worst = found
            why = refusal.message or f"it is at version {refusal.version}"
            sentence = f"block {refusal.block} refused: {refusal.code}, {why}"
    return found_worst, sentence


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_ORDER.__getitem__, default=Verdict.ACKNOWLEDGED)


def is_moving(answer: PushAnswer) -> bool:
    """Whether blocks are frozen because they are on their way."""
    return any(refused.code == MOVING for refused in answer.refused)


def moved_blocks(answer: PushAnswer) -> frozenset[int]:
    """The blocks that have to be pushed to another parameter server."""
    return frozenset(
        refused.block for refused in answer.refused if _VERDICTS.get(refused.code) is Verdict.MOVED
    )
