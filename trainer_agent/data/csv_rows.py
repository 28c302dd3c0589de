"""CSV: the shared scanner finds the rows, Arrow parses them. Column types are the same for every task."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO

import pyarrow as pa
from pyarrow import csv as arrow_csv

from shared.datasets.line_scan import data_start, refuse_archive
from shared.errors import DatasetError
from shared.records.datasets import Csv
from shared.storage import files
from shared.storage.compressed import Decompressed
from trainer_agent.data.arrow import columns_of_table
from trainer_agent.data.lines import RawRecords, read_range, read_raw
from trainer_agent.data.shard import Shard

SAMPLE_RECORDS = 10_000
_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


@dataclass(frozen=True, slots=True)
class Header:
    """Column names of one file, and the byte where its first record may start."""

    names: tuple[str, ...]
    start: int


class CsvReader:
    def __init__(self, dataset: Csv) -> None:
        self._dataset = dataset
        self._content = Decompressed()
        self._headers: dict[str, Header] = {}
        self._types: dict[str, pa.DataType] | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        refuse_archive(file)
        with self._lock, files.reading(file, "CSV"), self._content.opened(file) as source:
            header = self._header(file, source)
            types = self._column_types()
            raw = read_range(source, self._dataset, file, first, count, offset, header.start)
            return Shard(columns_of_table(self._parse(file, raw, header.names, types)), count)

    def _header(self, file: str, source: BinaryIO) -> Header:
        if file not in self._headers:
            start = data_start(source)
            if self._dataset.column_names is not None:
                self._headers[file] = Header(self._dataset.column_names, start)
            else:
                raw = read_raw(source, self._dataset, file, start, 1)
                if not len(raw):
                    msg = f"{file} is empty: no header line"
                    raise DatasetError(msg, hint="remove it, or give column_names", url=file, records=0)
                text = raw.record(0).decode()
                names = tuple(next(csv.reader(io.StringIO(text, newline=""), delimiter=self._dataset.delimiter)))
                self._headers[file] = Header(names, start + raw.ends[0] + 1)
            names = self._headers[file].names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DatasetError(
                    f"{file} has two columns {twice!r}", hint="rename one, or give column_names", url=file
                )
            unknown = [name for name in self._dataset.column_types if name not in names]
            if unknown:
                msg = f"{file} has no column {unknown[0]!r}; it has {', '.join(names)}"
                raise DatasetError(msg, hint="correct column_types={…} in dataset()", url=file)
        return self._headers[file]

    def _column_types(self) -> dict[str, pa.DataType]:
        """For the whole dataset, from the first file that has records: so all trainers use the same types."""
        if self._types is None:
            found = (self._types_in(file) for url in self._dataset.urls for file in files.expand(url))
            self._types = next(filter(None, found), {})
        return self._types

    def _types_in(self, file: str) -> dict[str, pa.DataType]:
        with files.reading(file, "CSV"), self._content.opened(file) as source:
            try:
                header = self._header(file, source)
            except DatasetError as error:
                if error.details.get("records") == 0:
                    return {}
                raise
            raw = read_raw(source, self._dataset, file, header.start, SAMPLE_RECORDS)
            if not len(raw):
                return {}
            given = {name: _TYPES[kind] for name, kind in self._dataset.column_types.items()}
            schema = self._parse(file, raw, header.names, given).schema
            return {name: given.get(name) or _kept_type(schema.field(name).type) for name in header.names}

    def _parse(self, file: str, raw: RawRecords, names: tuple[str, ...], types: dict[str, pa.DataType]) -> pa.Table:
        begin = raw.starts[0]
        content = raw.content[begin : raw.ends[-1]] + b"\n"
        try:
            table = arrow_csv.read_csv(
                pa.py_buffer(content),
                read_options=arrow_csv.ReadOptions(
                    use_threads=False, column_names=list(names), block_size=max(len(content), 1)
                ),
                parse_options=arrow_csv.ParseOptions(delimiter=self._dataset.delimiter, newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(column_types=types),
            )
        except pa.ArrowInvalid as error:
            msg = f"{file} cannot be read as CSV: {error}"
            hint = "correct the file; a column whose first values have another type needs column_types={name: type}"
            raise DatasetError(msg, hint=hint, url=file) from error
        if table.num_rows != len(raw):
            msg = f"{file}: {len(raw)} lines were found, but they make {table.num_rows} rows"
            raise DatasetError(msg, hint=r"end each row with \n or \r\n (RFC 4180)", url=file)
        return table


def _kept_type(found: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(found):
        return pa.int64()
    if pa.types.is_floating(found):
        return pa.float32()
    return found if pa.types.is_boolean(found) else pa.string()
