"""The tasks of one kind in an epoch: which task stands where, by arithmetic in O(files) memory, and how many
minibatches each stream has.

A stream is every `streams`-th position: stream s, index i  <->  position s + i * streams.

EpochOrder   t7 t2 t9 t4 t0 t5       streams = 2:   stream 0 = t7 t9 t0     stream 1 = t2 t4 t5

The streams of lanes get equal shares of the epoch's minibatches (Dealing). One stream has its tasks in the
order of the epoch. Tasks of shards that can only be iterated stay in the order of their shard (Runs).
`plan_of` and `news_of` tell before a job begins what an epoch is made of.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, Protocol

from master_service.core.changes import Event, Fields
from master_service.core.queue.file_table import FileTable, longest_share
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import EpochPlan, JobSpec, Mode, Task, TaskKind

ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of an epoch: a bijection of [0, n) that is a function of (seed, epoch) alone. `shuffle` False
    is the identity.

    position --keyed Feistel over 2**(2k) >= n, repeated until inside [0, n)--> task number      (and back)

    The cost is fewer than 4 walks of 6 rounds on average, in O(1) memory. Source: J. Black, P. Rogaway,
    "Ciphers with Arbitrary Finite Domains" (cycle walking), rounds keyed by splitmix64.
    """

    n: int
    seed: int
    epoch: int
    shuffle: bool = True
    half_bits: int = field(init=False)
    keys: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        bits = max(2, (self.n - 1).bit_length()) if self.n else 2
        object.__setattr__(self, "half_bits", (bits + 1) // 2)
        object.__setattr__(
            self, "keys", tuple(step_seed(self.seed, self.epoch, -1 - i) for i in range(ROUNDS))
        )

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


def _round(value: int, key: int) -> int:
    mixed = ((value ^ key) * 0xBF58476D1CE4E5B9) & _MASK
    mixed ^= mixed >> 29
    mixed = (mixed * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)


_OF_CLASSES, _OF_ROWS = -2, -3


@dataclass(frozen=True, slots=True)
class Classes:
    """The tasks 0 to `total` - 1 by their minibatches. `short`: (task, minibatches) of those with fewer than
    `full`, in the order of tasks."""

    total: int
    full: int
    short: Iterable[tuple[int, int]] = field(repr=False, compare=False)
    sizes: tuple[int, ...] = field(init=False)
    ends: tuple[int, ...] = field(init=False)
    _members: dict[int, array[int]] = field(init=False, repr=False, compare=False)
    _not_full: array[int] = field(init=False, repr=False, compare=False)
    _before: array[int] = field(init=False, repr=False, compare=False)  # full tasks before each of those
    _sizes: array[int] = field(init=False, repr=False, compare=False)  # minibatches of each of those
    _inside: array[int] = field(init=False, repr=False, compare=False)  # its number in its class

    def __post_init__(self) -> None:
        members: dict[int, array[int]] = defaultdict(lambda: array("q"))
        not_full, of_short, inside = array("q"), array("q"), array("q")
        for task, minibatches in self.short:
            if minibatches < self.full:
                inside.append(len(members[minibatches]))
                members[minibatches].append(task)
                not_full.append(task)
                of_short.append(minibatches)
        counts = {self.full: self.total - len(not_full)} | {size: len(some) for size, some in members.items()}
        sizes = tuple(sorted((size for size, count in counts.items() if count), reverse=True))
        object.__setattr__(self, "short", ())
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "ends", tuple(accumulate(counts[size] for size in sizes)))
        object.__setattr__(self, "_members", dict(members))
        object.__setattr__(self, "_not_full", not_full)
        object.__setattr__(self, "_before", array("q", (task - k for k, task in enumerate(not_full))))
        object.__setattr__(self, "_sizes", of_short)
        object.__setattr__(self, "_inside", inside)

    @property
    def counts(self) -> Counter[int]:
        """Minibatches of a task -> how many tasks have so many."""
        ends = (0, *self.ends)
        return Counter({size: ends[k + 1] - ends[k] for k, size in enumerate(self.sizes)})

    def task(self, size: int, number: int) -> int:
        """The task that is number `number` (from 0) of those with `size` minibatches."""
        return (
            self._members[size][number] if size < self.full else number + bisect_right(self._before, number)
        )

    def number(self, task: int) -> tuple[int, int]:
        """(class, number in it) of a task: the inverse of `task`. A class is an index of `sizes`."""
        at = bisect_left(self._not_full, task)
        if at == len(self._not_full) or self._not_full[at] != task:
            return 0, task - at
        return self.sizes.index(self._sizes[at]), self._inside[at]


@dataclass(frozen=True, slots=True)
class Dealing:
    """The tasks of `classes` in `lanes` streams, in one epoch, so that all lanes end together. Stream s,
    index i <-> position s + i * lanes.

    tasks by their minibatches, the most first      3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 2 2 1 1
                                                    (class 3, class 2, class 1)
    dealt to the lanes, row by row                  lanes 0-7: 3 3 3 3 3 3 3 3 | 3 3 3 3 3 3 3 2 | 2 1 1

    each lane's share depends on no epoch: lane 0 has the most, 3 + 3 + 2

    Which task of a class takes which of its places, and the order of the rows, are permutations of the epoch.
    Tasks that are all alike are dealt as one class, and rows stay where they are. Two lanes differ by fewer
    minibatches than the largest task has.
    """

    classes: Classes
    lanes: int
    seed: int
    epoch: int
    _within: dict[int, EpochOrder] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The permutations of each class are made when they are needed, because the keys of one cost several
    hashes."""
    _rows: EpochOrder | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.classes.total // self.lanes
        several = len(self.classes.ends) > 1 and rows > 1
        object.__setattr__(
            self,
            "_rows",
            EpochOrder(rows, step_seed(self.seed, _OF_ROWS, 0), self.epoch) if several else None,
        )

    def task_at(self, position: int) -> int:
        """The task number that stands at `position`. Raises IndexError outside [0, total)."""
        if not 0 <= position < self.classes.total:
            msg = f"position {position} is outside [0, {self.classes.total})"
            raise IndexError(msg)
        dealt = self._moved(position, lambda rows, row: rows.task_at(row))
        k = bisect_right(self.classes.ends, dealt)
        inside = dealt - (self.classes.ends[k - 1] if k else 0)
        return self.classes.task(self.classes.sizes[k], self._order(k).task_at(inside))

    def position_of(self, task: int) -> int:
        """Where task number `task` stands: the inverse of `task_at`. Raises IndexError outside [0, total)."""
        if not 0 <= task < self.classes.total:
            msg = f"task {task} is outside [0, {self.classes.total})"
            raise IndexError(msg)
        k, number = self.classes.number(task)
        dealt = self._order(k).position_of(number) + (self.classes.ends[k - 1] if k else 0)
        return self._moved(dealt, lambda rows, row: rows.position_of(row))

    def _order(self, k: int) -> EpochOrder:
        """Of the tasks of a class."""
        if k not in self._within:
            ends = (0, *self.classes.ends)
            seed = step_seed(self.seed, _OF_CLASSES, k) if k else self.seed
            self._within[k] = EpochOrder(ends[k + 1] - ends[k], seed, self.epoch)
        return self._within[k]

    def _moved(self, position: int, by: Callable[[EpochOrder, int], int]) -> int:
        """The same stream in another row; the last row stays where it is if it does not reach all lanes."""
        row, stream = divmod(position, self.lanes)
        if self._rows is None or row >= self._rows.n:
            return position
        return by(self._rows, row) * self.lanes + stream


_OF_RUNS = -4


@dataclass(frozen=True, slots=True)
class Runs:
    """The tasks of `table`, whose records can be read only one after the other, in `lanes` streams, in one
    epoch. Stream s, index i <-> position s + i * lanes.

    tasks of three shards       | 0  1  2  3  4 | 5  6  7 | 8  9 |
    runs of two streams         | 0  1  2  3  4 |         | 5  6  7 | 8  9 |
    an epoch                    8 9 5 6 7 in stream 1

    A stream has the same run in each epoch, so whoever computes it reads few shards, each from its start to
    its end. An epoch shuffles the shards of a run, never the tasks of a shard: for a task that lies behind
    the one before, the shard would be read from its start.
    """

    table: FileTable
    lanes: int
    seed: int
    epoch: int
    shuffle: bool
    #: Task at which the run of each stream ends.
    ends: tuple[int, ...] = field(init=False)
    _known: dict[int, _Run] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        lengths = (stream_length(self.table.tasks, self.lanes, stream) for stream in range(self.lanes))
        object.__setattr__(self, "ends", tuple(accumulate(lengths)))

    def task_at(self, position: int) -> int:
        """The task number that stands at `position`. Raises IndexError outside [0, tasks)."""
        self._check(position, "position")
        index, stream = divmod(position, self.lanes)
        run = self._run(stream)
        place = bisect_right(run.ends, index)
        before = run.ends[place - 1] if place else 0
        return run.firsts[run.order.task_at(place)] + index - before

    def position_of(self, task: int) -> int:
        """Where task number `task` stands: the inverse of `task_at`. Raises IndexError outside [0, tasks)."""
        self._check(task, "task")
        stream = bisect_right(self.ends, task)
        run = self._run(stream)
        part = bisect_right(run.firsts, task) - 1
        place = run.order.position_of(part)
        index = task - run.firsts[part] + (run.ends[place - 1] if place else 0)
        return stream + index * self.lanes

    def longest(self, minibatch: int) -> int:
        """Minibatches of the stream that has the most, the same in each epoch. `minibatch`: records of
        one."""
        full = -(-self.table.task_records // minibatch)
        shares = [(end - first) * full for first, end in zip((0, *self.ends), self.ends, strict=False)]
        for number, records in self.table.short_tasks:
            shares[bisect_right(self.ends, number)] -= full - -(-records // minibatch)
        return max(shares)

    def _check(self, value: int, what: str) -> None:
        if not 0 <= value < self.table.tasks:
            msg = f"{what} {value} is outside [0, {self.table.tasks})"
            raise IndexError(msg)

    def _run(self, stream: int) -> _Run:
        if stream not in self._known:
            first, end = self.ends[stream - 1] if stream else 0, self.ends[stream]
            cuts = self.table.task_ends
            inside = dict.fromkeys(cuts[bisect_right(cuts, first) : bisect_left(cuts, end)])
            firsts = (first, *inside)
            lengths = [last - start for start, last in zip(firsts, (*inside, end), strict=True)]
            seed = step_seed(self.seed, _OF_RUNS, stream)
            order = EpochOrder(len(firsts), seed, self.epoch, self.shuffle)
            ordered = (lengths[order.task_at(place)] for place in range(len(firsts)))
            self._known[stream] = _Run(firsts, tuple(accumulate(ordered)), order)
        return self._known[stream]


class _Run(NamedTuple):
    """`firsts`: the first task of each part that lies in one shard. `ends`: how many tasks of the run an
    epoch has up to the end of each part, in its `order` of the parts."""

    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    order: EpochOrder


REMEMBERED_ORDERS = 4
REMEMBERED_NUMBERS = 1024


class Order(Protocol):
    """The tasks of one epoch by position, and back."""

    def task_at(self, position: int) -> int: ...
    def position_of(self, task: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The tasks of `table` in `count` streams. Without a table: one task without records (EXPORT).
    `minibatch`: records of one.

    `balanced`: several shuffled streams get equal shares. False: a job that an earlier version began keeps
    its order.
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
    """Raises NotFound for an id that is not among these tasks. Remembered, because a pending task is asked
    for often."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", "" if self.kind is TaskKind.TRAIN else self.kind.lower())
        object.__setattr__(self, "total", self.table.tasks if self.table else 1)
        object.__setattr__(self, "records", self.table.records if self.table else 0)
        order: Callable[[int], Order] = partial(EpochOrder, self.total, self.seed, shuffle=self.shuffle)
        if self.table is not None and self.table.in_sequence:
            order = partial(Runs, self.table, self.count, self.seed, shuffle=self.shuffle)
        elif self.table is not None and self.deals:
            order = partial(Dealing, classes_of(self.table, self.minibatch), self.count, self.seed)
        object.__setattr__(self, "order", lru_cache(REMEMBERED_ORDERS)(order))
        object.__setattr__(self, "number", lru_cache(REMEMBERED_NUMBERS)(self._number))

    @property
    def deals(self) -> bool:
        """Whether the tasks are dealt in equal shares."""
        in_sequence = self.table is not None and self.table.in_sequence
        return self.balanced and self.shuffle and self.count > 1 and not in_sequence

    @property
    def longest(self) -> int | None:
        """Minibatches of the longest stream of an epoch, the same in each. None: it differs by epoch, as in
        jobs of earlier versions."""
        if self.table is None:
            return 1
        if self.table.in_sequence:
            return Runs(self.table, self.count, self.seed, 0, self.shuffle).longest(self.minibatch)
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
        """Of `weight(records)` over the tasks at positions [first, last) of the epoch (streams count 1). As
        many steps as there are files, not tasks: all tasks but the last one of each file have the same number
        of records."""
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


SHORT = 0.9
"""Steps that have less than so much of the global batch, on average, are told."""


def plan_of(spec: JobSpec, streams: Streams) -> EpochPlan:
    """`streams`: of the tasks that are trained."""
    table = streams.table
    assert table is not None
    size = -(-table.task_records // spec.minibatch_size)
    steps = streams.longest if spec.mode is Mode.SYNC else table.tasks * -(-size // spec.push_every)
    return EpochPlan(
        records=table.records,
        left_out=table.left_out,
        tasks=table.tasks,
        task_records=table.task_records,
        steps=steps,
    )


def news_of(spec: JobSpec, table: FileTable, plan: EpochPlan) -> Iterator[Event]:
    """What is told before a job begins."""
    if plan.left_out:
        message = (
            f"drop_last leaves out {plan.left_out} of {plan.records + plan.left_out} records in "
            "each epoch: the ends of files, "
            f"which do not fill a minibatch of {spec.minibatch_size}"
        )
        yield Event("records_left_out", message, {"records": plan.left_out})
    if sentence := short_steps(spec, table, plan):
        fields: Fields = {
            "steps": plan.steps or 0,
            "records": plan.records,
            "global_batch_size": spec.global_batch_size,
        }
        yield Event("steps_are_short", sentence, fields)


def short_steps(spec: JobSpec, table: FileTable, plan: EpochPlan) -> str:
    """A warning if steps of a synchronous job have fewer records than the user asked for, with the reason and
    what to do; else ""."""
    if spec.mode is not Mode.SYNC or not plan.steps:
        return ""
    full = -(-plan.records // spec.global_batch_size)
    average = plan.records / plan.steps
    if plan.steps <= full or plan.records >= SHORT * plan.steps * spec.global_batch_size:
        return ""
    reasons = list(_reasons(spec, table, plan))
    why, advice = (list(dict.fromkeys(texts)) for texts in zip(*reasons, strict=True))
    return (
        f"an epoch has {plan.steps} steps of {average:.4g} records on average, global_batch_size "
        f"is {spec.global_batch_size} "
        f"({full} steps would do): {'; and '.join(why)}; {', and '.join(advice)}"
    )


def _reasons(spec: JobSpec, table: FileTable, plan: EpochPlan) -> Iterator[tuple[str, str]]:
    """Why steps are short, and what to do: at least one."""
    files = [file.records for file in table.files if file.records]
    size, given = spec.minibatch_size, spec.records_per_task
    in_files = sum(-(-records // size) for records in files)
    if len(files) > 1 and in_files > -(-plan.records // size):
        average = plan.records / len(files)
        yield (
            (
                f"a minibatch has records of one file, and {len(files)} files of {average:.4g} records "
                f"on average do not fill minibatches of {size}"
            ),
            (
                "join the files, or set drop_last, or use minibatches of fewer records (a lower "
                "global_batch_size, or more lanes)"
            ),
        )
    if given is not None and given % size:
        yield (
            f"records_per_task {given} is no multiple of the {size} records of a minibatch",
            "leave records_per_task out",
        )
    if spec.lanes > 1 and plan.steps and plan.steps > -(-in_files // spec.lanes):
        tasks = f"{plan.tasks} task{'s' * (plan.tasks != 1)} of up to {table.task_records} records"
        yield (
            (
                f"{tasks} are no equal shares for {spec.lanes} lanes, so some lanes have no records "
                "while others train"
            ),
            "leave records_per_task out" if given is not None else "use fewer lanes",
        )
