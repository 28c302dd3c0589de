"""The records of one task in memory, kept as columns or as records, whichever the format has; both can be
read from either. And their order.

    shard.minibatch(indices) ──iterate──► records (dicts) for the user's collate
                             ──.columns──► arrays and lists for default_collate, no record is made on the way

The order in which a task's records are read is a function of (seed, epoch, task) alone, the same on every
machine: they are sorted by splitmix64 of their number. A numpy generator is not used: its stream may change
between versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from trireme_shared.datasets.numbers import Misfit, column_of, common_dtype, shown
from trireme_shared.platform.runtime import begun
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.lanes import step_seed

Indices = npt.NDArray[np.int64]
Column = npt.NDArray[Any] | list[Any]
Record = dict[str, Any]
T = TypeVar("T")
MakeColumns = Callable[[Sequence[Record]], Mapping[str, "Column | DatasetError"]]


class Shard:
    """Columns of equal length. Values of one record: Python scalars, arrays, text, bytes or None. A column
    may be the error that says why its records make none: who asks for columns gets it."""

    #: How a batch is made of a list of records; None: as default_collate does.
    collate: Callable[[list[Any]], Any] | None = None
    #: Makes the batch of all records, which were collated already; None: they were not.
    ready: Callable[[], Any] | None = None

    def __init__(self, columns: Mapping[str, Column | DatasetError], count: int) -> None:
        for name, column in columns.items():
            if not isinstance(column, DatasetError):
                assert len(column) == count, f"column {name} has {len(column)} of {count} records"
        self._columns = dict(columns)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._count} records: {', '.join(self._columns)}>"

    def columns(self, indices: Indices) -> dict[str, Column]:
        """Copies of the chosen records' columns: arrays (n, …), or lists of what has no common shape or no
        number. Raises DatasetError for a column that these records do not make."""
        chosen: dict[str, Column] = {}
        for name, column in self._columns.items():
            if isinstance(column, DatasetError):
                raise DatasetError(column.message, hint=column.hint, **column.details)
            chosen[name] = column[indices] if isinstance(column, np.ndarray) else [column[i] for i in indices]
        return chosen

    def records(self, indices: Indices) -> list[Record]:
        columns = self.columns(indices)
        return [{name: _value(column[i]) for name, column in columns.items()} for i in range(len(indices))]

    def minibatch(self, indices: Indices) -> Minibatch:
        return Minibatch(self, indices)

    def keep_columns(self) -> None:
        """In place: nobody will ask for `records`, so memory is for columns alone."""


class RecordShard(Shard):
    """Records of a format without columns. Their fields may differ: a missing one is None in `columns`, which
    are made when somebody asks for them. `make`: how, where their types are known
    (trainer_agent/data/reader.py)."""

    def __init__(self, records: Sequence[Record], make: MakeColumns | None = None) -> None:
        self._records: Sequence[Record] | None = records
        self._make: MakeColumns | None = make or columns_of
        super().__init__({}, len(records))

    def columns(self, indices: Indices) -> dict[str, Column]:
        self._made()
        return super().columns(indices)

    def records(self, indices: Indices) -> list[Record]:
        assert self._records is not None, "a shard that keeps columns is asked for records"
        return [self._records[i] for i in indices]

    def keep_columns(self) -> None:
        self._made()
        self._records = None

    def _made(self) -> None:
        if self._make is not None:
            assert self._records is not None
            super().__init__(self._make(self._records), len(self._records))
            self._make = None


class ItemShard(Shard):
    """Items of a DataLoader's dataset, as they are. `collate`: makes a batch of a list of them."""

    def __init__(self, items: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        super().__init__({}, len(items))
        self._items, self.collate = items, collate

    def columns(self, indices: Indices) -> dict[str, Column]:
        raise AssertionError(f"{self!r} has no columns: {len(indices)} records were asked for")

    def records(self, indices: Indices) -> list[Any]:
        return [self._items[i] for i in indices]


class ReadyShard(Shard):
    """Records that were collated where they were read; only their batch is here."""

    def __init__(self, count: int, ready: Callable[[], Any]) -> None:
        super().__init__({}, count)
        self.ready = ready

    def columns(self, indices: Indices) -> dict[str, Column]:
        raise AssertionError(f"{self!r} has no columns: {len(indices)} records were asked for")

    def records(self, indices: Indices) -> list[Any]:
        raise AssertionError(f"{self!r} has a batch alone: {len(indices)} records were asked for")


class Minibatch(Sequence[Record]):
    """The records of one minibatch; `columns` gives the same values faster. `work`: what it is, for the
    journal of the process that computes it (trireme_shared.platform.runtime.begun)."""

    work = b""

    def __init__(self, shard: Shard, indices: Indices) -> None:
        self._shard = shard
        self._indices = indices
        self._made: list[Record] | None = None

    @property
    def columns(self) -> dict[str, Column]:
        return self._shard.columns(self._indices)

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """See Shard."""
        return self._shard.collate

    @property
    def ready(self) -> Callable[[], Any] | None:
        """See Shard."""
        return self._shard.ready

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._all())

    def __repr__(self) -> str:
        return f"<Minibatch of {len(self)} records>"

    def _all(self) -> list[Record]:
        if self._made is None:
            self._made = self._shard.records(self._indices)
        return self._made


def on_record(work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`; the minibatch among them is on record meanwhile as what this process has begun."""
    records = next((each for each in arguments if isinstance(each, Minibatch)), None)
    if records is None or not records.work:
        return work(*arguments)
    with begun.at(records.work):
        return work(*arguments)


def columns_of(records: Sequence[Any]) -> dict[str, Column]:
    """Records as columns, in the order in which names first appear. A field that a record lacks is None.
    Raises DatasetError for a column whose numbers fit into no dtype."""
    names: dict[str, None] = {}
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            msg = f"record {number} is {type(record).__name__}, not a dict of column -> value"
            raise DatasetError(msg, hint='a record looks like {"pixels": [0.1, 0.2], "label": 3}')
        names.update(dict.fromkeys(record))
    return {name: named_column(name, [record.get(name) for record in records]) for name in names}


def named_column(name: str, values: list[Any]) -> Column:
    """As `as_column`. Raises DatasetError, with the column, the record and the value, instead of Misfit."""
    try:
        return as_column(values)
    except Misfit as error:
        msg = f"column {name!r}: record {error.number} has {shown(error.value)}: {error}"
        raise DatasetError(
            msg, hint="make the values alike, or define collate(records)", column=name
        ) from error


def as_column(values: list[Any]) -> Column:
    """An array if all values are numbers, or arrays of numbers, of one shape; a list of arrays if their
    shapes differ; else the list as it is. Python's numbers get the dtype that
    shared/trireme_shared/datasets/numbers.py says, numpy's keep theirs. Raises Misfit if there is none.
    """
    if not values or any(
        issubclass(kind, str | bytes | Mapping | NoneType) for kind in set(map(type, values))
    ):
        return values
    try:
        dtype = common_dtype(values)
    except (TypeError, OverflowError):  # objects that make no array
        return values
    return values if dtype is None else column_of(values, dtype)


def _value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def record_order(seed: int, epoch: int, task_number: int, count: int) -> Indices:
    """The permutation of [0, count) of one task in one epoch, read-only."""
    value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value += np.uint64(step_seed(seed, epoch, task_number))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    order = np.argsort(value, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


_last_order = lru_cache(maxsize=1)(record_order)


def minibatches_in(count: int, size: int) -> int:
    """Minibatches of `size` records in a task of `count`; the last one may be short."""
    return -(-count // size)


def minibatch_in(order: Indices | None, count: int, size: int, number: int) -> Indices:
    """Records of minibatch `number` (from 0) of a task of `count` records in this order (None: as they are),
    as int64 indices into its shard; read-only.

    Raises IndexError outside [0, minibatches_in(count, size)).
    """
    if not 0 <= number < minibatches_in(count, size):
        msg = (
            f"minibatch {number} is outside [0, {minibatches_in(count, size)}): the task has {count} records"
        )
        raise IndexError(msg)
    chosen = slice(number * size, min(count, (number + 1) * size))
    return order[chosen] if order is not None else np.arange(chosen.start, chosen.stop, dtype=np.int64)


def minibatch_indices(
    seed: int, epoch: int, task_number: int, count: int, size: int, number: int, *, shuffle: bool
) -> Indices:
    """As `minibatch_in`, for whoever reads one task after the other: the order of the last one is kept."""
    order = _last_order(seed, epoch, task_number, count) if shuffle else None
    return minibatch_in(order, count, size, number)


def evaluation_seed(seed: int, task_number: int, number: int) -> int:
    """Of minibatch `number` of an evaluation task: the same for every evaluation, and whoever does it."""
    return step_seed(seed, task_number, -2 - number)
