"""The blocks of one push, by parameter server: filled as backward finishes them, sent meanwhile, and again if a push fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.row_lookups import RowPart
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PushBlock

if TYPE_CHECKING:
    from trireme_shared.tables.lanes import LaneRows  # loads numba


@dataclass(frozen=True, slots=True)
class PushedRows:
    """A lane's gradients of rows of embedding tables. `rows`: of each table. `count`: the lane's records. `result` (synchronous): the rows of all lanes
    may be there, and be stepped, before a block of each is. `versions` (asynchronous): the rows that the gradients were computed from, by slot map
    version and parameter server."""

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
    """The blocks for one parameter server, in the order they were finished; may be read again from the start. `first`: the lanes
    whose data it got from this trainer first, as it said last. `rows`: the gradients of rows of all parameter servers, by lane: some may go to
    others than they were meant for."""

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
    def of(cls, items: Iterable[tuple[PushBlock, memoryview]], rows: Mapping[int, PushedRows] | None = None) -> Outbox:
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
        """Some of the blocks in `whole`, for another parameter server: it needs the results of their lanes, too."""
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

        No generator: the writer of a failed HTTP request still waits for its next block until it is cancelled, and a
        generator that another task waits for cannot be closed.
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
    """One push to all parameter servers, by pserver index. `dtypes[block]`: the narrower dtype in which it travels, if any.
    `version`: of the slot map they were made by. `versions` (asynchronous): of the blocks that gradients are computed from."""

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

    def add(self, block: int, lanes: Interval, count: int, result: NodeResult | None, payload: memoryview) -> None:
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
        """The lanes whose data came from this trainer first, at one parameter server: the same one for all trainers."""
        return self[min(self)].first if self else ()

    def close(self) -> None:
        """No more blocks will come."""
        for outbox in self.values():
            outbox.close()


class Contributions(Protocol):
    """The finished blocks of a compute's nodes, see Compute."""

    def samples(self, node: Interval) -> int: ...

    def contribution(self, node: Interval, block: int) -> memoryview: ...


class NodeSink:
    """A BlockSink: puts each finished block of `node`, a group of lanes, into the outbox of the block's owner. To be used in the event loop."""

    def __init__(
        self,
        outboxes: Outboxes,
        node: Interval,
        compute: Contributions,
        result: Callable[[], NodeResult] | None = None,
        lanes: Interval | None = None,
    ) -> None:
        """`result`, known by the first of the blocks, goes to each parameter server with the first block for it. `lanes`: as which the node is
        pushed, if not as itself."""
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
