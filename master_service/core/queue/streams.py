"""The tasks of one kind in streams: which task stands where in an epoch, and how many minibatches each stream has.

A stream is every `streams`-th position: stream s, index i  <->  position s + i * streams.

epoch order   t7 t2 t9 t4 t0 t5       streams = 2:   stream 0 = t7 t9 t0     stream 1 = t2 t4 t5

The streams of lanes get equal shares of the epoch's minibatches (dealing.py). One stream has its tasks in the order of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

from master_service.core.queue.dealing import Classes, Dealing, longest_share
from master_service.core.queue.epoch_order import EpochOrder
from master_service.core.queue.file_table import FileTable
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records import Task, TaskKind

REMEMBERED_ORDERS = 4
REMEMBERED_NUMBERS = 1024


class Order(Protocol):
    """The tasks of one epoch by position, and back."""

    def task_at(self, position: int) -> int: ...
    def position_of(self, task: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The tasks of `table` in `count` streams. Without a table: one task without records (EXPORT). `minibatch`: records of one.

    `balanced`: several shuffled streams get equal shares. False: a job that an earlier version began keeps its order.
    """

    kind: TaskKind
    table: FileTable | None = None
    count: int = 1
    seed: int = 0
    shuffle: bool = False
    minibatch: int = 1
    balanced: bool = True
    prefix: str = field(init=False)
    total: int = field(init=False)
    records: int = field(init=False)
    order: Callable[[int], Order] = field(init=False, repr=False, compare=False)
    """By epoch; remembered, because its keys cost several hashes."""
    number: Callable[[str], int] = field(init=False, repr=False, compare=False)
    """Raises NotFound for an id that is not among these tasks. Remembered, because a pending task is asked for often."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", "" if self.kind is TaskKind.TRAIN else self.kind.lower())
        object.__setattr__(self, "total", self.table.tasks if self.table else 1)
        object.__setattr__(self, "records", self.table.records if self.table else 0)
        order: Callable[[int], Order] = partial(EpochOrder, self.total, self.seed, shuffle=self.shuffle)
        if self.table is not None and self.deals:
            order = partial(Dealing, classes_of(self.table, self.minibatch), self.count, self.seed)
        object.__setattr__(self, "order", lru_cache(REMEMBERED_ORDERS)(order))
        object.__setattr__(self, "number", lru_cache(REMEMBERED_NUMBERS)(self._number))

    @property
    def deals(self) -> bool:
        """Whether the tasks are dealt in equal shares."""
        return self.balanced and self.shuffle and self.count > 1

    @property
    def longest(self) -> int | None:
        """Minibatches of the longest stream of an epoch, the same in each. None: it differs by epoch, as in jobs of earlier versions."""
        if self.table is None:
            return 1
        if self.deals:
            return longest_share(classes_of(self.table, self.minibatch).counts, self.count)
        if self.count == 1:
            return self.sum(0, 0, self.total, self._minibatches)
        if self.shuffle and self.table.uneven(self.minibatch):
            return None
        full, order = self._minibatches(self.table.task_records), self.order(0)
        shares = [full * self.length(stream) for stream in range(self.count)]
        for number, records in self.table.short_tasks:
            shares[order.position_of(number) % self.count] -= full - self._minibatches(records)
        return max(shares)

    def _minibatches(self, records: int) -> int:
        return -(-records // self.minibatch)

    def task_id(self, number: int) -> str:
        """`17` for training, `evaluate-17` and `export-0` for the others."""
        return f"{self.prefix}-{number}" if self.prefix else str(number)

    def _number(self, task_id: str) -> int:
        digits = task_id.removeprefix(f"{self.prefix}-") if self.prefix else task_id
        plain = digits.isascii() and digits.isdigit() and len(digits) <= len(str(self.total))
        if not plain or int(digits) >= self.total or self.task_id(int(digits)) != task_id:
            msg = f"task {task_id} does not exist: {self.kind} has {self.total} tasks"
            raise NotFound(msg)
        return int(digits)

    def name(self, stream: int) -> str:
        """Its name in the cursor keys."""
        return self.prefix or str(stream)

    def length(self, stream: int) -> int:
        return stream_length(self.total, self.count, stream)

    def at(self, epoch: int, stream: int, index: int) -> str:
        """Id of the task at (stream, index)."""
        return self.task_id(self.order(epoch).task_at(stream + index * self.count))

    def place(self, epoch: int, task_id: str) -> tuple[int, int]:
        """(stream, index) of a task. Raises NotFound."""
        position = self.order(epoch).position_of(self.number(task_id))
        return position % self.count, position // self.count

    def records_of(self, task_id: str) -> int:
        return self.table.locate(self.number(task_id)).count if self.table else 0

    def sum(self, epoch: int, first: int, last: int, weight: Callable[[int], int]) -> int:
        """Of `weight(records)` over the tasks at positions [first, last) of the epoch (streams count 1). As many steps as there are
        files, not tasks: all tasks but the last one of each file have the same number of records."""
        if self.table is None or first >= last:
            return 0
        full, whole = weight(self.table.task_records), (first, last) == (0, self.total)
        total = full * (last - first)
        for number, records in self.table.short_tasks:
            if whole or first <= self.order(epoch).position_of(number) < last:
                total += weight(records) - full
        return total

    def describe(self, task_id: str) -> str:
        """`task 7 (train.parquet records 0-511)`."""
        if self.table is None:
            return f"task {task_id}"
        place = self.table.locate(self.number(task_id))
        return f"task {task_id} ({place.file} records {place.first}-{place.first + place.count - 1})"

    def task(self, task_id: str, attempt: int, epoch: int, stream: int, index: int) -> Task:
        """What a trainer is given."""
        place = self.table.locate(self.number(task_id)) if self.table else None
        return Task(
            task_id=task_id,
            kind=self.kind,
            attempt=attempt,
            epoch=epoch,
            stream=stream,
            index=index,
            stream_length=self.length(stream),
            file=place.file if place else "",
            first=place.first if place else 0,
            count=place.count if place else 0,
            offset=place.offset if place else None,
            stamp=place.stamp if place else "",
        )


def classes_of(table: FileTable, minibatch: int) -> Classes:
    """The table's tasks by their minibatches."""
    short = ((number, -(-records // minibatch)) for number, records in table.short_tasks)
    return Classes(table.tasks, -(-table.task_records // minibatch), short)


def stream_length(n: int, streams: int, stream: int) -> int:
    """Tasks of one stream: how many positions of [0, n) are congruent to `stream` modulo `streams`."""
    return max(0, (n - stream + streams - 1) // streams)
