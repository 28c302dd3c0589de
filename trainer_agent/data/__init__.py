"""Readers: the records of a task, as minibatches and batches.

open_dataset(spec.dataset).read(task.file, task.first, task.count, task.offset) ──► Shard
shard.minibatch(minibatch_indices(seed, epoch, task, len(shard), size, number, shuffle=…)) ──► default_collate
    ──► batch

A reader is wrapped (Blaming), so that each of its errors says which file and records it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import assert_never

import numpy as np

from trainer_agent.data.arrays import BytesReader, NpyReader
from trainer_agent.data.collate import default_collate
from trainer_agent.data.images import ImageFolderReader
from trainer_agent.data.in_code import CustomReader, MapStyleReader
from trainer_agent.data.iterables import IterableStyleReader
from trainer_agent.data.lines import LineReader
from trainer_agent.data.loaders import LoaderItems
from trainer_agent.data.reader import ColumnTypes, Reader
from trainer_agent.data.record_files import RecordIOReader, TFRecordReader, WebDatasetReader
from trainer_agent.data.shard import (
    Minibatch,
    Record,
    Shard,
    evaluation_seed,
    minibatch_in,
    minibatch_indices,
    minibatches_in,
)
from trireme_shared.datasets.dataset_files import CountedFiles, from_first_file
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, TriremeError, is_interrupt
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Csv,
    Custom,
    Dataset,
    HuggingFace,
    ImageFolder,
    IterableStyle,
    JsonLines,
    MapStyle,
    Npy,
    Parquet,
    RecordIO,
    TextLines,
    TFRecord,
    WebDataset,
)

__all__ = [
    "Blaming",
    "Minibatch",
    "Reader",
    "Shard",
    "default_collate",
    "evaluation_seed",
    "minibatch_in",
    "minibatch_indices",
    "minibatches_in",
    "open_dataset",
]


def open_dataset(
    dataset: Dataset,
    seed: int = 0,
    changed: Callable[[str], object] | None = None,
    *,
    named: bool = True,
) -> Blaming:
    """The reader of a dataset. `seed`: of the job, for random numbers that the user's own readers and objects
    draw. `changed`: is told of a file that is not the counted one, which is then read all the same; None: it
    is refused. `named`: the values of items that are tuples get names, because the script has no `collate`
    that takes them as they are. Nothing is opened yet. Raises DatasetError if a Custom reader cannot be
    imported."""
    reader = _reader_of(dataset, seed, named, changed)
    in_code = isinstance(dataset, MapStyle | IterableStyle)
    as_they_are = isinstance(dataset, MapStyle | IterableStyle) and (not named or dataset.loader)
    if (in_code and not as_they_are) or isinstance(dataset, Custom):
        reader = TypedByFirstRecord(dataset, reader)
    return Blaming(reader, CountedFiles(dataset), changed)


def _reader_of(dataset: Dataset, seed: int, named: bool, changed: Callable[[str], object] | None) -> Reader:
    match dataset:
        case Parquet():
            # pyarrow only where it is needed
            from trainer_agent.data.arrow import ParquetReader  # noqa: PLC0415

            return ParquetReader(dataset)
        case Csv():
            from trainer_agent.data.arrow import CsvReader  # noqa: PLC0415

            return CsvReader(dataset)
        case TextLines() | JsonLines():
            return LineReader(dataset)
        case Bytes():
            return BytesReader(dataset)
        case Npy():
            return NpyReader(dataset)
        case Custom():
            return CustomReader(dataset, seed)
        case MapStyle():
            return MapStyleReader(dataset, seed, named=named)
        case IterableStyle():
            return IterableStyleReader(dataset, seed, named=named, changed=changed)
        case TFRecord():
            return TFRecordReader(dataset)
        case RecordIO():
            return RecordIOReader(dataset)
        case WebDataset():
            return WebDatasetReader(dataset)
        case HuggingFace():
            from trainer_agent.data.arrow import HuggingFaceReader  # noqa: PLC0415

            return HuggingFaceReader(dataset)
        case ImageFolder():
            return ImageFolderReader(dataset)
        case _:
            assert_never(dataset)


@contextmanager
def blaming(file: str, first: int, count: int) -> Iterator[None]:
    """Whatever code raises in this block that makes these records, or columns of them, says whose fault it
    is: DatasetError for the records, ResourceExhausted and StorageUnreachable for what the machine or the
    storage lacks."""
    try:
        yield
    except TriremeError:
        raise
    except BaseException as error:  # the user's datasets and their values may raise anything, SystemExit too
        if is_interrupt(error):
            raise
        records = f"{file} records {first}-{first + count - 1}"
        if (trouble := trouble_in_user_code(error, records)) is not None:
            raise trouble from error
        msg = f"{records} cannot be read: {type(error).__name__}: {error}"
        hint = "correct or remove the record, or correct the code that reads it"
        raise DatasetError(msg, hint=hint, url=file) from error


class Blaming:
    """A reader whose every failure says whose fault it is, so that no record ends the process that reads it:
    DatasetError for the records, ResourceExhausted and StorageUnreachable for what the machine or the storage
    lacks. A file that is not the counted one is refused before it is read, and that ends the job (`fatal`);
    with `changed` that is only told."""

    def __init__(
        self, reader: Reader, files: CountedFiles, changed: Callable[[str], object] | None = None
    ) -> None:
        self._reader, self._files, self._changed = reader, files, changed

    def __repr__(self) -> str:
        return f"<Blaming {self._reader!r}>"

    def read(self, file: str, first: int, count: int, offset: int | None = None, stamp: str = "") -> Shard:
        """See Reader; `stamp`: of the file when it was counted. Raises ResourceExhausted, StorageUnreachable
        as well: the same read may succeed later."""
        self._check(file, stamp)
        with blaming(file, first, count):
            return self._reader.read(file, first, count, offset)

    def chosen(self, file: str, numbers: Sequence[int], stamp: str = "") -> Shard:
        """As `read`, for records of a map-style object by number."""
        assert isinstance(self._reader, MapStyleReader | TypedByFirstRecord)
        self._check(file, stamp)
        with blaming(file, min(numbers), max(numbers) - min(numbers) + 1):
            return self._reader.chosen(file, numbers)

    @property
    def taken(self) -> LoaderItems | None:
        """What is kept of the DataLoader that this dataset is; None: it is none. Raises as `read`."""
        reader = self._reader
        return reader.taken if isinstance(reader, MapStyleReader | IterableStyleReader) else None

    def _check(self, file: str, stamp: str) -> None:
        difference = self._files.difference(file, stamp)
        if difference is not None and self._changed is not None:
            self._changed(f"{difference.message}; it is trained all the same (changed_files = report)")
        elif difference is not None:
            raise DatasetError(difference.message, hint=difference.hint, fatal=True, **difference.details)


class TypedByFirstRecord:
    """A reader of the user's code whose columns have the types of the dataset's first record, which is the
    same for all trainers. A first record that cannot be read leaves each task to its own values."""

    def __init__(self, dataset: Dataset, reader: Reader) -> None:
        self._dataset, self._reader = dataset, reader
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<TypedByFirstRecord {self._reader!r}>"

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        if not count:  # only the user's object is to be made
            return self._reader.read(file, first, count, offset)
        types = self._first_types()
        shard = self._reader.read(file, first, count, offset)
        return types.shard(shard.records(np.arange(len(shard))), file, range(first, first + count))

    def chosen(self, file: str, numbers: Sequence[int]) -> Shard:
        """See MapStyleReader."""
        assert isinstance(self._reader, MapStyleReader)
        types = self._first_types()
        shard = self._reader.chosen(file, numbers)
        return types.shard(shard.records(np.arange(len(shard))), file, numbers)

    def _first_types(self) -> ColumnTypes:
        with self._lock:
            if self._types is None:
                self._types = self._found()
            return self._types

    def _found(self) -> ColumnTypes:
        advice = "return values of one type for all records, e.g. float(value), or define collate(records)"
        try:
            file, found = from_first_file(self._dataset, self._first_of)
        except DatasetError:
            file, found = "", ()
        return ColumnTypes(found, f"record 0 of {file}", advice)

    def _first_of(self, file: str) -> Sequence[Record]:
        return self._reader.read(file, 0, 1).records(np.arange(1))
