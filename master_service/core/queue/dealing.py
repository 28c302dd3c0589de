"""Which task stands where in an epoch, so that the lanes of a synchronous job end together: all by arithmetic, O(files) memory.

tasks by their minibatches, the most first      3 3 3 3 3 3 3 3 3 3 3 3 3 3 3 2 2 1 1        (class 3, class 2, class 1)
dealt to the lanes, row by row                  lanes 0-7: 3 3 3 3 3 3 3 3 | 3 3 3 3 3 3 3 2 | 2 1 1
                                                each lane's share depends on no epoch: lane 0 has the most, 3 + 3 + 2

Which task of a class takes which of its places, and the order of the rows, are permutations of the epoch. Tasks that are all alike are
dealt as one class, and rows stay where they are. Two lanes differ by fewer minibatches than the largest task has.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from master_service.core.queue.epoch_order import EpochOrder
from trireme_shared.protocol.lanes import step_seed

_OF_CLASSES, _OF_ROWS = -2, -3


def longest_share(sizes: Mapping[int, int], lanes: int) -> int:
    """Minibatches of the lane that has the most. `sizes`: minibatches of a task -> how many tasks have so many."""
    most = place = 0
    for size in sorted(sizes, reverse=True):
        end = place + sizes[size]
        most += size * (-(-end // lanes) - -(-place // lanes))
        place = end
    return most


@dataclass(frozen=True, slots=True)
class Classes:
    """The tasks 0 to `total` - 1 by their minibatches. `short`: (task, minibatches) of those with fewer than `full`, in the order of tasks."""

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
        return self._members[size][number] if size < self.full else number + bisect_right(self._before, number)

    def number(self, task: int) -> tuple[int, int]:
        """(class, number in it) of a task: the inverse of `task`. A class is an index of `sizes`."""
        at = bisect_left(self._not_full, task)
        if at == len(self._not_full) or self._not_full[at] != task:
            return 0, task - at
        return self.sizes.index(self._sizes[at]), self._inside[at]


@dataclass(frozen=True, slots=True)
class Dealing:
    """The tasks of `classes` in `lanes` streams, in one epoch. Stream s, index i <-> position s + i * lanes."""

    classes: Classes
    lanes: int
    seed: int
    epoch: int
    _within: dict[int, EpochOrder] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The permutations of each class are made when they are needed, because the keys of one cost several hashes."""
    _rows: EpochOrder | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = self.classes.total // self.lanes
        several = len(self.classes.ends) > 1 and rows > 1
        object.__setattr__(
            self, "_rows", EpochOrder(rows, step_seed(self.seed, _OF_ROWS, 0), self.epoch) if several else None
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
