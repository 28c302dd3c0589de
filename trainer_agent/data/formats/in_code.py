"""Objects of the user's own code: map-style datasets, which are read by number, and iterables, which are read from their start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from threading import Lock
from typing import Any

from trainer_agent.data.drawing import Drawing
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Record, RecordShard, Shard
from trireme_shared.datasets.random_state import seeded
from trireme_shared.datasets.user_modules import load_object
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, is_interrupt
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle

_END = object()
_PLAIN_NAMES = ("x", "y")
_HOOKS = (":dataset", ":evaluation_dataset")


class MapStyleReader:
    """The object is made by the first read. `seed`: of the job."""

    def __init__(self, dataset: MapStyle, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._object: Any = None
        self._drawing = Drawing(dataset.reader, seed)
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock:
            if self._object is None:
                self._object = _loaded(self._dataset, self._seed)

            def record(number: int) -> Record:
                try:
                    item = self._object[number]
                except IndexError as error:
                    raise too_short(file, first, count, number) from error
                except BaseException as error:  # the user's code may raise anything
                    if is_interrupt(error):
                        raise
                    if (trouble := trouble_in_user_code(error, f"item {number} of {file}")) is not None:
                        raise trouble from error
                    msg = f"item {number} of {file} cannot be read: {type(error).__name__}: {error}"
                    raise DatasetError(msg, hint="correct the dataset's __getitem__", url=file) from error
                return as_record(item, self._dataset.columns, file, number)

            return RecordShard(list(self._drawing.each(file, range(first, first + count), record)))


class IterableStyleReader:
    """Keeps one iterator and its place: tasks that follow each other go on with it."""

    def __init__(self, dataset: IterableStyle, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._drawing = Drawing(dataset.reader, seed, by_epoch=False)
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock:
            if self._iterator is None or self._next > first:
                self._begin(file)
            found = []
            numbers = range(self._next, first + count)
            for number, item in zip(numbers, self._drawing.each("", numbers, partial(self._item, file)), strict=False):
                if item is _END:
                    self._iterator = None
                    raise too_short(file, first, count, number)
                if number >= first:
                    found.append(as_record(item, self._dataset.columns, file, number))
        return RecordShard(found)

    def _begin(self, file: str) -> None:
        made = _loaded(self._dataset, self._seed)
        try:
            with seeded(self._seed):
                self._iterator, self._next = iter(made), 0
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            if (trouble := trouble_in_user_code(error, file)) is not None:
                raise trouble from error
            msg = f"{file} cannot be iterated: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the dataset's __iter__", url=file) from error

    def _item(self, file: str, number: int) -> Any:
        assert self._iterator is not None
        try:
            item = next(self._iterator, _END)
        except BaseException as error:  # the user's code may raise anything
            self._iterator = None
            if is_interrupt(error):
                raise
            if (trouble := trouble_in_user_code(error, f"item {number} of {file}")) is not None:
                raise trouble from error
            msg = f"item {number} of {file} cannot be read: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the dataset's __iter__", url=file) from error
        self._next = number + 1
        return item


def _loaded(dataset: MapStyle | IterableStyle, seed: int) -> Any:
    """The object. Raises DatasetError; InvalidArgument if its length is not what was counted. Where the user has stated `records`, they may be
    some of those that a MapStyle has, and the length of an iterable may count anything."""
    made, name, counted = load_object(dataset, seed=seed), dataset.reader, dataset.records
    of_hook = name.endswith(_HOOKS)
    if counted is None or not hasattr(made, "__len__") or not (of_hook or isinstance(dataset, MapStyle)):
        return made
    records = len(made)
    if records < counted or (records > counted and of_hook):
        msg = f"{name} has {records} records at this trainer, and {counted} were counted when the job was made"
        hint = "it must have the same records in every process, whatever the host, the time and the process"
        raise InvalidArgument(msg, hint=hint, url=name, records=records)
    return made


def as_record(item: Any, columns: tuple[str, ...] | None, file: str, number: int) -> Record:
    """A dict as it is; a tuple's values by `columns`, else as x and y; any other value as x. Raises DatasetError."""
    if isinstance(item, Mapping):
        if columns is not None:
            named, given = ", ".join(map(str, item)), ", ".join(columns)
            msg = f"item {number} of {file} is a dict with the columns {named}, and columns=({given}) name the values of tuples"
            raise DatasetError(msg, hint="leave columns out", url=file)
        return dict(item)
    values = tuple(item) if isinstance(item, tuple | list) else (item,)
    names = columns or _PLAIN_NAMES[: len(values)]
    if len(names) != len(values):
        msg = f"item {number} of {file} has {len(values)} values, but there are {len(names)} names: {', '.join(names)}"
        raise DatasetError(msg, hint="name them: MapStyle(…, columns=(…)), or make items that are dicts", url=file)
    return dict(zip(names, values, strict=True))
