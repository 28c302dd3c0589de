"""The order of an epoch, and where a task stands in it: all by arithmetic, in O(1) memory.

position --keyed Feistel over 2**(2k) >= n, repeated until inside [0, n)--> task number      (and back)

The order is a permutation of [0, n) that is a function of (seed, epoch) alone. A stream is every `streams`-th position:
stream s, index i  <->  position s + i * streams.

epoch order   t7 t2 t9 t4 t0 t5       streams = 2:   stream 0 = t7 t9 t0     stream 1 = t2 t4 t5

Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (cycle walking), rounds keyed by splitmix64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

from master_service.core.queue.file_table import FileTable
from shared.errors import NotFound
from shared.lanes import step_seed
from shared.records import Task, TaskKind

ROUNDS = 6
REMEMBERED_ORDERS = 4
REMEMBERED_NUMBERS = 1024
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Bijection of [0, n). `shuffle` False is the identity. Cost: fewer than 4 walks of 6 rounds on average."""

    n: int
    seed: int
    epoch: int
    shuffle: bool = True
    half_bits: int = field(init=False)
    keys: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        bits = max(2, (self.n - 1).bit_length()) if self.n else 2
        object.__setattr__(self, "half_bits", (bits + 1) // 2)
        object.__setattr__(self, "keys", tuple(step_seed(self.seed, self.epoch, -1 - i) for i in range(ROUNDS)))

    def task_at(self, position: int) -> int:
        """The task number that stands at `position`."""
        self._check(position, "position")
        if not self.shuffle:
            return position
        value = self._encrypt(position)
        while value >= self.n:
            value = self._encrypt(value)
        return value

    def position_of(self, task: int) -> int:
        """Where task number `task` stands: the inverse of `task_at`."""
        self._check(task, "task")
        if not self.shuffle:
            return task
        value = self._decrypt(task)
        while value >= self.n:
            value = self._decrypt(value)
        return value

    def _check(self, value: int, what: str) -> None:
        if not 0 <= value < self.n:
            msg = f"{what} {value} is outside [0, {self.n})"
            raise IndexError(msg)

    def _encrypt(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_round(right, key) & mask)
        return (left << self.half_bits) | right

    def _decrypt(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in reversed(self.keys):
            left, right = right ^ (_round(left, key) & mask), left
        return (left << self.half_bits) | right


@dataclass(frozen=True, slots=True)
class Streams:
    """The tasks of `table` in `count` streams. Without a table: one task without records (EXPORT)."""

    kind: TaskKind
    table: FileTable | None = None
    count: int = 1
    seed: int = 0
    shuffle: bool = False
    prefix: str = field(init=False)
    total: int = field(init=False)
    records: int = field(init=False)
    order: Callable[[int], EpochOrder] = field(init=False, repr=False, compare=False)
    """By epoch; remembered, because its keys cost several hashes."""
    number: Callable[[str], int] = field(init=False, repr=False, compare=False)
    """Raises NotFound for an id that is not among these tasks. Remembered, because a pending task is asked for often."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", "" if self.kind is TaskKind.TRAIN else self.kind.lower())
        object.__setattr__(self, "total", self.table.tasks if self.table else 1)
        object.__setattr__(self, "records", self.table.records if self.table else 0)
        order = partial(EpochOrder, self.total, self.seed, shuffle=self.shuffle)
        object.__setattr__(self, "order", lru_cache(REMEMBERED_ORDERS)(order))
        object.__setattr__(self, "number", lru_cache(REMEMBERED_NUMBERS)(self._number))

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
        )


def stream_length(n: int, streams: int, stream: int) -> int:
    """Tasks of one stream: how many positions of [0, n) are congruent to `stream` modulo `streams`."""
    return max(0, (n - stream + streams - 1) // streams)


def _round(value: int, key: int) -> int:
    mixed = ((value ^ key) * 0xBF58476D1CE4E5B9) & _MASK
    mixed ^= mixed >> 29
    mixed = (mixed * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)
