"""Formats that Arrow reads into tables, whose columns become those of a shard: CSV, saved HF datasets, and
Parquet. This module loads pyarrow.

CSV            the shared scanner finds the rows, Arrow parses them; column types are the same for every task
HF datasets    rows of Arrow files, which are mapped
Parquet        the row groups used last are kept, so that tasks of one group read it once
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from trainer_agent.data import images
from trainer_agent.data.lines import read_range
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Column, Shard, as_column
from trireme_shared.datasets.csv_columns import CsvColumns
from trireme_shared.datasets.line_scan import refuse_archive
from trireme_shared.datasets.mapped_files import read_arrow
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed
from trireme_shared.platform.storage.files import kept_open
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, HuggingFace, Parquet

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

KEPT_FILES = 32
KEPT_BYTES = 256 << 20


class CsvReader:
    def __init__(self, dataset: Csv) -> None:
        self._dataset = dataset
        self._content = Decompressed()
        self._columns = CsvColumns(dataset)
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        refuse_archive(file)
        with self._lock, files.reading(file, "CSV"), self._content.opened(file) as source:
            header = self._columns.header(file, source)
            raw = read_range(source, self._dataset, file, first, count, offset, header.start)
            return Shard(columns_of_table(self._columns.table(file, raw, header.names, first)), count)


class HuggingFaceReader:
    """Keeps the mappings of the files used last."""

    def __init__(self, dataset: HuggingFace) -> None:
        self._dataset = dataset
        self._kept_files = min(KEPT_FILES, kept_open())
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock:
            table = self._table(file)
        if first + count > table.num_rows:
            raise too_short(file, first, count, table.num_rows)
        columns = columns_of_table(table.slice(first, count))
        for name in _images(table.schema) if self._dataset.decode else ():
            if name in columns:
                columns[name] = self._decoded(columns[name], file, first, name)
        return Shard(columns, count)

    def _table(self, file: str) -> pa.Table:
        if file not in self._tables:
            table = read_arrow(file)
            missing = [name for name in self._dataset.columns or () if name not in table.column_names]
            if missing:
                msg = f"{file} has no column {missing[0]!r}; it has {', '.join(table.column_names)}"
                raise DatasetError(msg, hint="correct columns=(…) in dataset()", url=file)
            self._tables[file] = table.select(list(self._dataset.columns)) if self._dataset.columns else table
            if len(self._tables) > self._kept_files:
                self._tables.popitem(last=False)
        self._tables.move_to_end(file)
        return self._tables[file]

    def _decoded(self, values: Column, file: str, first: int, name: str) -> Column:
        found = []
        for number, value in enumerate(values, first):
            place = f"column {name!r} of record {number}"
            if value is None:
                raise DatasetError(f"{file}: {place} has no image", hint="filter such rows out", url=file)
            content = value["bytes"]
            if content is None:
                with files.reading(value["path"], "an image"):
                    content = files.read_bytes(value["path"])
            found.append(images.decoded(content, self._dataset.image_size, file, place))
        return as_column(found)


def _images(schema: pa.Schema) -> list[str]:
    """Columns of type Image, by what `datasets` wrote into the schema."""
    try:
        said: dict[str, Any] = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return []
    return [name for name, kind in said.items() if isinstance(kind, dict) and kind.get("_type") == "Image"]


def columns_of_table(table: pa.Table) -> dict[str, Column]:
    """Numbers and lists of numbers as arrays (missing floats are NaN); lists of several lengths as lists of
    arrays; everything else as lists of Python values. A column of which values are missing is a list with
    None in their places, and the others keep their dtype."""
    return {name: _column(_array(table.column(name))) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _column(array: pa.Array) -> Column:
    kind = array.type
    is_number = types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    if is_number and (array.null_count == 0 or types.is_floating(kind)):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if isinstance(kind, pa.FixedShapeTensorType) and array.null_count == 0:
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(array, pa.ExtensionArray):
        return _column(array.storage)
    if types.is_dictionary(kind):
        return _column(array.dictionary_decode())
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if array.null_count and (is_list or is_number):
        return _with_gaps(_column(array.drop_null()), array.is_valid().to_pylist())
    if types.is_fixed_size_list(kind):
        return _rows(_column(array.flatten()), np.full(len(array), kind.list_size))
    if is_list:
        return _rows(_column(array.flatten()), np.asarray(array.value_lengths()))
    values: list[Any] = array.to_pylist()
    return values


def _with_gaps(present: Column, valid: list[bool]) -> list[Any]:
    """The values with None where none is. Numbers stay numpy's, so that their dtype does not depend on what
    is missing."""
    values = iter(present)
    return [next(values) if there else None for there in valid]


def _rows(flat: Column, lengths: Any) -> Column:
    """`flat` cut into rows: one array if all have the same length."""
    if not isinstance(flat, np.ndarray):
        ends = np.cumsum(lengths).tolist()
        rows = [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        return [
            np.asarray(row) if row and all(isinstance(each, np.generic) for each in row) else row
            for row in rows
        ]
    if len(lengths) and (lengths == lengths[0]).all():
        return flat.reshape(len(lengths), int(lengths[0]), *flat.shape[1:])
    return np.split(flat, np.cumsum(lengths)[:-1])


class ParquetReader:
    """Keeps the row groups used last: at least one, and up to `kept_bytes`."""

    def __init__(self, dataset: Parquet, kept_bytes: int = KEPT_BYTES) -> None:
        self._columns = list(dataset.columns) if dataset.columns is not None else None
        self._kept_bytes = kept_bytes
        self._groups: OrderedDict[tuple[str, int], pa.Table] = OrderedDict()
        self._footers: dict[str, FileMetaData] = {}
        self._lock = Lock()
        self.groups_read = 0

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock, files.reading(file, "Parquet"):
            footer = self._footer(file)
            ends = list(
                accumulate(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
            )
            if not ends or first + count > ends[-1]:
                raise too_short(file, first, count, ends[-1] if ends else 0)
            pieces = []
            for group in range(bisect_right(ends, first), footer.num_row_groups):
                start = ends[group - 1] if group else 0
                if start >= first + count:
                    break
                begin = max(first, start) - start
                pieces.append(
                    self._group(file, group).slice(begin, min(first + count, ends[group]) - start - begin)
                )
            return Shard(columns_of_table(pa.concat_tables(pieces)), count)

    def _footer(self, file: str) -> FileMetaData:
        if file not in self._footers:
            from pyarrow.parquet import read_metadata  # noqa: PLC0415

            with files.open_read(file) as source:
                footer = read_metadata(source)
            names = footer.schema.to_arrow_schema().names
            missing = [name for name in self._columns or () if name not in names]
            if missing:
                msg = f"{file} has no column {missing[0]!r}; it has {', '.join(names)}"
                raise DatasetError(msg, hint="correct columns=(…) in dataset()", url=file)
            self._footers[file] = footer
        return self._footers[file]

    def _group(self, file: str, group: int) -> pa.Table:
        key = (file, group)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415

        with files.open_read(file) as source, ParquetFile(source, metadata=self._footers[file]) as parquet:
            table = parquet.read_row_group(group, columns=self._columns, use_threads=False)
        self.groups_read += 1
        self._groups[key] = table
        kept = sum(table.nbytes for table in self._groups.values())
        while kept > self._kept_bytes and len(self._groups) > 1:
            _, dropped = self._groups.popitem(last=False)
            kept -= dropped.nbytes
        return table
