"""The minibatches of one task whose records are read by number: they come one after the other, and the first
ones are computed while the others are read.

    Parts: missing ─► under way ─► there (kept until the task is over)
                         └─ failed, or given up ─► missing: whoever needs it reads it again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

import numpy as np

from trainer_agent.data import Minibatch, Shard, minibatch_in, minibatches_in
from trainer_agent.data.shard import Indices


class Parts:
    """`count` records from number `first` on, `size` in a minibatch. `order`: computes in which they are
    trained, once; None: as they are."""

    def __init__(self, first: int, count: int, size: int, order: Callable[[], Indices] | None = None) -> None:
        self._first, self._count, self._size, self._make_order = first, count, size, order
        self._order: Indices | None = None
        self._there: dict[int, Shard] = {}
        self._under_way = set[int]()
        self._changed = asyncio.Event()
        #: one has failed: they are read when they are needed, not ahead
        self.given_up = False

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        total = minibatches_in(self._count, self._size)
        return f"<Parts: {len(self._there)} of {total} minibatches, {self._count} records>"

    def records_of(self, number: int) -> list[int]:
        """The numbers of the records of a minibatch in their file. Raises IndexError. Takes time when first
        called: not in the event loop."""
        if self._order is None and self._make_order is not None:
            self._order = self._make_order()
        return (self._first + minibatch_in(self._order, self._count, self._size, number)).tolist()  # type: ignore[no-any-return]

    def missing(self, first: int = 0) -> list[int]:
        """Minibatches from `first` on that nobody reads, and that are not there."""
        total = minibatches_in(self._count, self._size)
        if len(self._there) == total:  # as of most tasks, in most steps
            return []
        known = self._there.keys() | self._under_way
        return [number for number in range(first, total) if number not in known]

    def has(self, number: int) -> bool:
        return number in self._there

    def is_under_way(self, number: int) -> bool:
        return number in self._under_way

    def put(self, number: int, shard: Shard) -> None:
        """In place: its records, in order. From any thread; then `tell`."""
        self._there[number] = shard

    def tell(self) -> None:
        """Those who wait in `changed` go on. In the event loop."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def minibatch(self, number: int) -> Minibatch:
        """One that is there. Raises IndexError for one that the task does not have."""
        if not 0 <= number < minibatches_in(self._count, self._size):
            minibatch_in(None, self._count, self._size, number)  # raises
        shard = self._there[number]
        return shard.minibatch(np.arange(len(shard)))

    @contextmanager
    def reading(self, numbers: Sequence[int]) -> Iterator[Event]:
        """Somebody reads these minibatches as long as the block runs. Behind it the event is set: a thread
        that still reads them ends."""
        self._under_way.update(numbers)
        ended = Event()
        try:
            yield ended
        finally:
            ended.set()
            self._under_way.difference_update(numbers)
            self.tell()

    async def changed(self) -> None:
        """Until a minibatch is there, or is not read any more."""
        await self._changed.wait()
