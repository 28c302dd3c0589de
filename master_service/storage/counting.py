"""Counts the records of one file, as its format says.

Of lines and framed records (RecordIO, TFRecord, tar files) the bytes at which tasks may start are kept: 8
bytes each. Everything here blocks. Every error names the URL and what to do.

What files say of their records before these are read: columns and types. All files of a dataset must say the
same, and a job whose files differ fails while its records are counted, not in the middle of an epoch.

footer, header, head ─► {column: type} of each file ─check─► DatasetError: file, column, both types

Formats without a schema (JSON lines, TFRecord, tars, a user's own) are compared by the trainers, column by
column, if the script has no `collate` of its own: with one their records may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from master_service.core.queue.file_table import TableFile
from trireme_shared.datasets import mapped_files
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, Dataset, HuggingFace, Npy, Parquet

if TYPE_CHECKING:
    import pyarrow as pa
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from master_service.core.queue.file_table import TaskSizes
from trireme_shared.datasets import record_files
from trireme_shared.datasets.dataset_files import joined_stamps, list_images
from trireme_shared.datasets.iterables import Shards, record_digest
from trireme_shared.datasets.line_scan import Lines, RecordScanner, chunks, data_start, refuse_archive
from trireme_shared.datasets.user_modules import count_object, load_custom
from trireme_shared.protocol.errors import is_interrupt
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Custom,
    ImageFolder,
    IterableStyle,
    MapStyle,
    RecordIO,
    TFRecord,
    WebDataset,
)

Progress = Callable[[int, int], None]


Counter = Callable[[str], TableFile]
CHECK_EVERY = 1024
CSV_RECORDS = 100  # of each file that are parsed


def counter_of(
    dataset: Dataset,
    sizes: TaskSizes,
    check: Callable[[], None],
    heads: Heads,
    seed: int,
) -> Counter:
    """`check` is called often, and raises when counting shall stop."""
    match dataset:
        case Parquet():
            return lambda file: _count_or_empty(file, lambda file: _count_parquet(file, heads))
        case Bytes():
            return lambda file: _count_bytes(file, dataset)
        case Npy():
            return lambda file: _count_or_empty(file, lambda file: _count_npy(file, heads))
        case Custom():
            return _custom_counter(dataset)
        case MapStyle():
            return lambda name: TableFile(name, count_object(dataset, seed))
        case IterableStyle():
            if (stated := dataset.stated) is not None:
                return lambda name: TableFile(name, stated[name])
            shards = Shards(dataset, seed)
            return lambda name: _count_iterated(name, shards, sizes, check)
        case TFRecord() | RecordIO() | WebDataset():
            return lambda file: count_framed(file, dataset, sizes, check)
        case HuggingFace():
            return lambda file: _count_arrow(file, heads)
        case ImageFolder():
            return _count_images
        case Csv():
            return lambda file: _count_csv(file, dataset, sizes, check, heads)
        case _:
            return lambda file: _count_lines(file, dataset, sizes, check)


def _count_or_empty(file: str, count: Counter) -> TableFile:
    try:
        return count(file)
    except DatasetError:
        if not files.is_empty(file):
            raise
        return TableFile(file, 0)


def _count_parquet(file: str, heads: Heads) -> TableFile:
    import pyarrow.parquet as pq  # noqa: PLC0415  only where it is needed

    with files.reading(file, "Parquet"), files.open_read(file) as source:
        footer = pq.read_metadata(source)
        heads.arrow(file, footer.schema.to_arrow_schema())
        return TableFile(file, int(footer.num_rows))


def _count_arrow(file: str, heads: Heads) -> TableFile:
    # pyarrow only where it is needed
    from trireme_shared.datasets.mapped_files import read_arrow  # noqa: PLC0415

    table = read_arrow(file)
    heads.arrow(file, table.schema)
    return TableFile(file, int(table.num_rows))


def _count_csv(
    file: str, dataset: Csv, sizes: TaskSizes, check: Callable[[], None], heads: Heads
) -> TableFile:
    counted = _count_lines(file, dataset, sizes, check)
    if counted.records:
        heads.rows(file)
    return counted


def _count_iterated(name: str, shards: Shards, sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    """Keeps digests of the first records of tasks."""
    kept, digests = TaskStarts(sizes), array("q")
    for number, record in enumerate(shards.records(name)):
        digests.append(record_digest(record) if number % kept.stride == 0 else 0)
        if len(digests) == CHECK_EVERY:
            check()
            kept.take(np.array(digests))
            digests = array("q")
    kept.take(np.array(digests, dtype=np.int64))
    return kept.counted(name)


def _count_images(root: str) -> TableFile:
    listing = list_images(root)
    return TableFile(listing.stamped(root), len(listing.names))


def _count_bytes(file: str, dataset: Bytes) -> TableFile:
    with files.reading(file, "bytes"):
        return TableFile(file, max(0, (files.size(file) - dataset.overlap) // dataset.record_bytes))


def _count_lines(file: str, dataset: Lines, sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    refuse_archive(file)
    kept = TaskStarts(sizes)
    with files.reading(file, dataset.kind), scanning(file) as source:
        scanner = RecordScanner(dataset, file, data_start(source))
        header = isinstance(dataset, Csv) and dataset.column_names is None
        for chunk in chunks(source):
            check()
            starts, _ = scanner.feed(chunk)
            if header and len(starts):
                starts, header = starts[1:], False
            kept.take(starts)
        last = scanner.finish()
        if last is not None and not header:
            kept.take(np.array([last[0]], dtype=np.int64))
    return kept.counted(file)


def check_names(dataset: Npy, files: list[str]) -> None:
    """Rows of all files must get the same column name, unless the files are aligned."""
    for file in files:
        stem, first = PurePosixPath(file).stem, PurePosixPath(files[0]).stem
        if not dataset.aligned and dataset.columns is None and stem != first:
            msg = f"the rows of {file} would be called {stem!r}, those of {files[0]} {first!r}"
            raise DatasetError(
                msg, hint='name them: Npy(…, columns=("x",)), or join the files with aligned=True', url=file
            )
    names = len(dataset.columns or ())
    if dataset.columns is not None and names != (len(files) if dataset.aligned else 1):
        msg = (
            f"columns names {names} arrays, but there are {len(files)} "
            f"files{' aligned' if dataset.aligned else ''}"
        )
        raise DatasetError(
            msg, hint="give one name, or with aligned=True one for each file", urls=list(dataset.urls)
        )


def _count_npy(file: str, heads: Heads) -> TableFile:
    with files.reading(file, ".npy"), files.open_read(file) as source:
        shape, _, dtype = mapped_files.read_npy_head(source)
        if not shape or dtype.hasobject:
            what = "a single number" if not shape else "Python objects"
            raise DatasetError(
                f"{file} holds {what}, not rows of numbers", hint="save an array of numbers", url=file
            )
    heads.array(file, shape, dtype)
    return TableFile(file, int(shape[0]))


def aligned(files: list[TableFile]) -> TableFile:
    for file in files:
        if file.records != files[0].records:
            msg = (
                f"{file.path} has {file.records} rows, {files[0].path} has {files[0].records}, but "
                "aligned=True"
            )
            raise DatasetError(msg, hint="aligned files have the same number of rows", url=file.path)
    return replace(files[0], stamp=joined_stamps([file.stamp for file in files]))


def _custom_counter(dataset: Custom) -> Counter:
    reader = load_custom(dataset.reader)

    def count(url: str) -> TableFile:
        try:
            records = int(reader.count(url))
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            msg = f"{dataset.reader}.count({url!r}) failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="fix the reader", url=url) from error
        if records < 0:
            raise DatasetError(
                f"{dataset.reader}.count({url!r}) gave {records}", hint="a count is 0 or more", url=url
            )
        return TableFile(url, records)

    return count


def why_empty(dataset: Dataset) -> str:
    match dataset:
        case Bytes():
            return (
                f"a record takes {dataset.record_bytes} + {dataset.overlap} bytes: give longer files "
                "or a smaller record_bytes"
            )
        case Csv(column_names=None):
            return "the first line of a CSV file is its header; without one, give column_names"
        case _:
            return "point dataset() at files with records"


class TaskStarts:
    """Every so many records one byte (`kept`), as TaskSizes says; of a long file fewer."""

    def __init__(self, sizes: TaskSizes) -> None:
        self.records = 0
        self._sizes, self._stride = sizes, sizes.stride(0)
        self.kept = array("q")

    @property
    def stride(self) -> int:
        """Records from one kept byte to the next one."""
        return self._stride

    def take(self, starts: npt.NDArray[np.int64]) -> None:
        """In place: the bytes of the next records."""
        self.kept.frombytes(starts[-self.records % self._stride :: self._stride].tobytes())
        self.records += len(starts)
        if (stride := self._sizes.stride(self.records)) > self._stride:
            self.kept, self._stride = self.kept[:: stride // self._stride], stride

    def counted(self, file: str) -> TableFile:
        """The file, all of whose records were taken."""
        return TableFile(file, self.records, tuple(self.kept))


def count_framed(
    file: str, dataset: TFRecord | RecordIO | WebDataset, sizes: TaskSizes, check: Callable[[], None]
) -> TableFile:
    """`check` is called often, and raises when counting shall stop. Raises DatasetError with the byte of what
    is damaged."""
    with files.reading(file, dataset.kind), scanning(file) as source:
        if isinstance(dataset, RecordIO):  # readers find chunks by their heads
            records = 0
            for chunk in record_files.record_io_chunks(source, file):
                check()
                records += chunk.records
            return TableFile(file, records)
        if isinstance(dataset, TFRecord):
            return _counted(file, record_files.tf_record_starts(source, file), sizes, check)
        starts = (record.start for record in record_files.tar_records(source, file))
        return _counted(file, starts, sizes, check)


def _counted(file: str, starts: Iterator[int], sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    kept = TaskStarts(sizes)
    while len(some := np.fromiter(islice(starts, CHECK_EVERY), np.int64)):
        check()
        kept.take(some)
    return kept.counted(file)


Head = Mapping[str, str]


class Heads:
    """Of one dataset. `note` and `check_rows` are called by the threads that count; a file that nobody noted
    is read by `check`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._noted: dict[str, Head] = {}
        self._rows: Callable[[str], Head] | None = None
        if isinstance(dataset, Csv):
            self._rows = _csv_rows(dataset)

    def note(self, file: str, head: Head) -> None:
        self._noted[file] = head

    def arrow(self, file: str, schema: pa.Schema) -> None:
        """Note the columns of an Arrow schema that the dataset has."""
        assert isinstance(self._dataset, Parquet | HuggingFace)
        chosen = self._dataset.columns or schema.names
        self.note(file, {name: _kind(schema.field(name).type) for name in chosen if name in schema.names})

    def array(self, file: str, shape: Sequence[int], dtype: Any) -> None:
        """Note the rows of an array."""
        self.note(file, {"row": f"{dtype.newbyteorder('=')} of shape {tuple(shape[1:])}"})

    def rows(self, file: str) -> None:
        """Note the columns of a CSV file, whose first rows must have the dataset's types. Raises
        DatasetError."""
        assert self._rows is not None
        self.note(file, self._rows(file))

    def check(self, counted: Sequence[TableFile]) -> None:
        """Raises DatasetError for the first file that differs from the first one with records."""
        if isinstance(self._dataset, Npy) and self._dataset.aligned:
            return
        if not isinstance(self._dataset, Parquet | HuggingFace | Npy | Csv):
            return
        with_records = [file.path for file in counted if file.records]
        for file in with_records:
            if file not in self._noted:
                self._read(file)
            first = self._noted[with_records[0]]
            if self._noted[file] != first:
                raise self._difference(with_records[0], first, file, self._noted[file])

    def _read(self, file: str) -> None:
        if isinstance(self._dataset, Csv):
            self.rows(file)
        elif isinstance(self._dataset, Npy):
            with files.reading(file, ".npy"), files.open_read(file) as source:
                shape, _, dtype = mapped_files.read_npy_head(source)
            self.array(file, shape, dtype)
        elif isinstance(self._dataset, Parquet):
            import pyarrow.parquet as pq  # noqa: PLC0415  only where it is needed

            with files.reading(file, "Parquet"), files.open_read(file) as source:
                self.arrow(file, pq.read_schema(source))
        else:
            from trireme_shared.datasets.mapped_files import read_arrow  # noqa: PLC0415

            self.arrow(file, read_arrow(file).schema)

    def _difference(self, first_file: str, first: Head, file: str, head: Head) -> DatasetError:
        for name in (*first, *head):
            if head.get(name) == first.get(name):
                continue
            if name not in head or name not in first:
                lacking, having = (file, first_file) if name not in head else (first_file, file)
                msg = f"{lacking} has no column {name!r}, and {having} has it"
                hint = (
                    "give all files the same columns, or choose those that all have: "
                    f"columns=({self._common(first, head)})"
                )
            elif isinstance(self._dataset, Npy):
                msg = f"the rows of {file} are {head[name]}, those of {first_file} {first[name]}"
                hint = "save them alike: numpy.save(path, array.astype(...))"
            else:
                msg = f"column {name!r} is {head[name]} in {file} and {first[name]} in {first_file}"
                hint = (
                    "write it with one type in all files, or choose other columns: "
                    f"columns=({self._common(first, head)})"
                )
            return DatasetError(msg, hint=hint, url=file, column=name)
        raise AssertionError  # they differ

    def _common(self, first: Head, head: Head) -> str:
        return "".join(f'"{name}", ' for name in first if head.get(name) == first[name]).rstrip()


def _csv_rows(dataset: Csv) -> Callable[[str], Head]:
    # pyarrow only where it is needed
    from trireme_shared.datasets.csv_columns import CsvColumns  # noqa: PLC0415
    from trireme_shared.datasets.line_scan import read_raw  # noqa: PLC0415

    columns = CsvColumns(dataset)

    def read(file: str) -> Head:
        with files.reading(file, "CSV"), scanning(file) as source:
            header = columns.header(file, source)
            raw = read_raw(source, dataset, file, header.start, CSV_RECORDS)
            chosen = dataset.columns or header.names
            types = columns.types()
            if all(name in types for name in chosen):
                columns.table(file, raw, header.names, 0)
            return {name: str(types.get(name, "")) for name in sorted(chosen)}

    return read


def _kind(kind: pa.DataType) -> str:
    """The type as batches show it: spellings of one type (`string`, `large_string`, a dictionary of strings)
    are one kind."""
    from pyarrow import types  # noqa: PLC0415

    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_fixed_size_list(kind):
        return f"list of {kind.list_size} {_kind(kind.value_type)}"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if types.is_struct(kind):
        return f"struct of {', '.join(f'{field.name}: {_kind(field.type)}' for field in kind)}"
    if types.is_string(kind) or types.is_large_string(kind):
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    if types.is_timestamp(kind):
        return "timestamp"
    return "decimal" if types.is_decimal(kind) else str(kind)
