"""What the user's own code reads: map-style datasets, which are read by number, and custom readers, by name
(iterables: iterables.py).

Some of these records draw random numbers (augmentation, noise, a crop). torch, NumPy and Python have one
generator for all threads of a process, and records are read in threads beside forward passes. A record that
draws would get other numbers each time, and so would forward. So such a record is read alone, with a seed of
its own, and the generators are put back behind it (Drawing):

    record of a dataset that draws      ALONE ─► seeded by (seed, epoch, file, number) ─► read
        ─► generators as they were
    record of one that does not         read, beside whatever runs

Whether a dataset draws is found out with its first records, and looked at again with one of LOOK_EVERY while
no forward pass runs; one of LOOK_AT_LEAST waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import takewhile
from threading import Lock
from typing import Any, TypeVar

from trainer_agent.data.loaders import UNCOUNTED, LoaderItems, WeightedOrder, taken_here
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import ItemShard, Record, RecordShard, Shard
from trireme_shared.datasets.random_state import (
    PROBED,
    Generators,
    alone_if_free,
    seed_everything,
    seed_of,
    undisturbed,
)
from trireme_shared.datasets.user_modules import load_custom, load_object
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, is_interrupt
from trireme_shared.protocol.records.datasets import Custom, IterableStyle, MapStyle

EVALUATION = -1
LOOK_EVERY, LOOK_AT_LEAST = 64, 256  # records
TURN_S = 0.005  # then forward may go on
T = TypeVar("T")
_epoch: ContextVar[int] = ContextVar("epoch", default=EVALUATION)
_PLAIN_NAMES = ("x", "y")
_HOOKS = (":dataset", ":evaluation_dataset")


@contextmanager
def reading(epoch: int) -> Iterator[None]:
    """Records that are read in the block, in this thread, are those of an epoch, or of EVALUATION."""
    token = _epoch.set(epoch)
    try:
        yield
    finally:
        _epoch.reset(token)


class Drawing:
    """One dataset in one process. `what`: its name, for messages. `seed`: of the job. `by_epoch`: a record
    draws other numbers in another epoch; not those of an iterable, since an iterator goes on from epoch to
    epoch at one trainer and begins again at another."""

    def __init__(self, what: str, seed: int, *, by_epoch: bool = True) -> None:
        self._what, self._seed, self._by_epoch = what, seed, by_epoch
        self._generator = ""  # which one it draws from
        self._read = self._looked = 0
        self._late = ""

    def __repr__(self) -> str:
        return f"<Drawing of {self._what}: {self._generator or 'none'} after {self._read} records>"

    def each(self, file: str, numbers: Sequence[int], read: Callable[[int], T]) -> Iterator[T]:
        """`read(number)` of each record of `file`. Raises what it raises, and InvalidArgument if a record
        draws although those before it did not."""
        seed = seed_of(self._seed, _epoch.get() if self._by_epoch else EVALUATION, file)
        self._check()
        done = 0
        while done < len(numbers):
            if looked_at := self._looked_at(seed, numbers, done, read):
                yield from looked_at
                done += len(looked_at)
            else:
                yield read(numbers[done])
                done, self._read = done + 1, self._read + 1

    def _looked_at(self, seed: int, numbers: Sequence[int], done: int, read: Callable[[int], T]) -> list[T]:
        """The next records, read alone; none if they are read beside whatever runs. Reading would stand still
        if each record that is only looked at waited for forward passes."""
        unseen = self._read - self._looked
        if self._generator or self._read < PROBED or unseen >= LOOK_AT_LEAST:
            return self._alone(seed, numbers[done:], read)
        if unseen < LOOK_EVERY:
            return []
        with alone_if_free() as free:
            return self._alone(seed, numbers[done:], read) if free else []

    def _alone(self, seed: int, numbers: Sequence[int], read: Callable[[int], T]) -> list[T]:
        """At least one of them, for TURN_S."""
        found: list[T] = []
        with undisturbed():
            until = clock.monotonic() + TURN_S
            for number in numbers:
                seed_everything(seed_of(seed, number))
                before = None if self._generator else Generators.now()
                found.append(read(number))
                if before is not None and (drawn := before.differs()):
                    self._found(drawn, number)
                self._read += 1
                self._looked = self._read
                if clock.monotonic() > until or not (self._generator or self._read < PROBED):
                    break
        return found

    def _found(self, generator: str, number: int) -> None:
        """Raises InvalidArgument if records were read already as if none drew."""
        self._generator = generator
        if self._read > PROBED:
            self._late = (
                f"record {number} of {self._what} draws from the random generator of {generator}, "
                f"and the first {PROBED} did not: those between were "
                "read beside forward passes, whose random numbers they may have changed"
            )
            self._check()

    def _check(self) -> None:
        if self._late:
            hint = "let each record draw, or none: draw a number that is not used where none is needed"
            raise InvalidArgument(self._late, hint=hint)


class MapStyleReader:
    """The object is made by the first read. `seed`: of the job. `named`: an item becomes a record with named
    values; else it is left as it is."""

    def __init__(self, dataset: MapStyle, seed: int, *, named: bool = True) -> None:
        self._dataset, self._seed, self._named = dataset, seed, named
        self._object: Any = None
        self._taken: LoaderItems | None = None
        self._weighted: WeightedOrder | None = None
        self._drawing = Drawing(dataset.reader, seed)
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        return self.chosen(file, range(first, first + count))

    @property
    def taken(self) -> LoaderItems | None:
        """What is kept of the DataLoader; None: there is none. Raises as `read`."""
        with self._lock:
            if self._object is None:
                self._make()
            return self._taken

    def chosen(self, file: str, numbers: Sequence[int]) -> Shard:
        """As `read`, for records by number."""
        with self._lock:
            if self._object is None:
                self._make()
            taken, weighted, epoch = self._taken, self._weighted, _epoch.get()

            def record(number: int) -> Any:
                place = number if weighted is None else weighted.drawn(epoch, number)
                try:
                    item = self._object[place]
                except IndexError as error:
                    first = min(numbers)
                    raise too_short(file, first, max(numbers) - first + 1, number) from error
                except BaseException as error:  # the user's code may raise anything
                    if is_interrupt(error):
                        raise
                    if (trouble := trouble_in_user_code(error, f"item {place} of {file}")) is not None:
                        raise trouble from error
                    msg = f"item {place} of {file} cannot be read: {type(error).__name__}: {error}"
                    raise DatasetError(msg, hint="correct the dataset's __getitem__", url=file) from error
                if taken is not None:
                    return item
                return as_record(item, self._dataset.columns, file, number, named=self._named)

            found = list(self._drawing.each(file, numbers, record))
            return RecordShard(found) if taken is None else ItemShard(found, taken.collate)

    def _make(self) -> None:
        """Raises DatasetError, InvalidArgument."""
        name = self._dataset.reader
        if not self._dataset.loader:
            self._object = loaded(self._dataset, self._seed)
            return
        taken = taken_here(load_object(self._dataset, self._seed), name, named=self._named)
        if taken.count == UNCOUNTED:
            msg = f"{name} is a DataLoader over an IterableDataset, whose items have no numbers"
            made = f'{{"kind": "iterable_style", "reader": "{name}", "loader": true}}'
            raise DatasetError(msg, hint=f"create the job with the dataset {made}", fatal=True, url=name)
        _check_length(self._dataset, taken.count)
        if taken.weights is not None:
            self._weighted = WeightedOrder(taken.weights, self._seed)
        self._taken, self._object = taken, taken.items


class CustomReader:
    """`seed`: of the job."""

    def __init__(self, dataset: Custom, seed: int) -> None:
        self._name = dataset.reader
        self._reader = load_custom(dataset.reader)
        self._drawing = Drawing(dataset.reader, seed)

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        source: Iterator[Record] | None = None

        def record(_: int) -> Record | None:
            nonlocal source
            if source is None:  # a reader may read all of its records here
                source = iter(self._reader.read(file, first, count))
            return next(source, None)

        try:
            made = self._drawing.each(file, range(first, first + count), record)
            records = [
                found for found in takewhile(lambda found: found is not None, made) if found is not None
            ]
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error) or isinstance(error, InvalidArgument):
                raise
            if (trouble := trouble_in_user_code(error, file)) is not None:
                raise trouble from error
            msg = f"{self._name}.read({file!r}, {first}, {count}) failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the reader", url=file) from error
        if len(records) < count:
            raise too_short(file, first, count, first + len(records))
        return RecordShard(records)


def loaded(dataset: MapStyle | IterableStyle, seed: int) -> Any:
    """The object. Raises DatasetError; InvalidArgument if its length is not what was counted. Where the user
    has stated `records`, they may be some of those that a MapStyle has, and the length of an iterable may
    count anything."""
    made, name, counted = load_object(dataset, seed=seed), dataset.reader, dataset.records
    of_hook = name.endswith(_HOOKS)
    is_of_records = (of_hook or isinstance(dataset, MapStyle)) and not dataset.loader  # that counts batches
    if counted is not None and is_of_records and hasattr(made, "__len__"):
        _check_length(dataset, len(made))
    return made


def _check_length(dataset: MapStyle | IterableStyle, records: int) -> None:
    """Raises InvalidArgument."""
    name, counted = dataset.reader, dataset.records
    of_hook = name.endswith(_HOOKS)
    if counted is not None and (records < counted or (records > counted and of_hook)):
        msg = (
            f"{name} has {records} records at this trainer, and {counted} were counted when the job was made"
        )
        hint = "it must have the same records in every process, whatever the host, the time and the process"
        raise InvalidArgument(msg, hint=hint, url=name, records=records)


def as_record(
    item: Any, columns: tuple[str, ...] | None, file: str, number: int, *, named: bool = True
) -> Any:
    """A dict as it is; a tuple's values by `columns`, else as x and y; any other value as x. Not `named`: if
    there are no `columns`, any item but a dict is left alone. Raises DatasetError."""
    if isinstance(item, Mapping):
        if columns is not None:
            has, given = ", ".join(map(str, item)), ", ".join(columns)
            msg = (
                f"item {number} of {file} is a dict with the columns {has}, and columns=({given}) "
                "name the values of tuples"
            )
            raise DatasetError(msg, hint="leave columns out", url=file)
        return dict(item)
    if columns is None and not named:
        return item
    values = tuple(item) if isinstance(item, tuple | list) else (item,)
    names = columns or _PLAIN_NAMES[: len(values)]
    if len(names) != len(values):
        msg = (
            f"item {number} of {file} has {len(values)} values, but there are {len(names)} names: "
            f"{', '.join(names)}"
        )
        raise DatasetError(
            msg, hint="name them: MapStyle(…, columns=(…)), or make items that are dicts", url=file
        )
    return dict(zip(names, values, strict=True))
