"""Columns of CSV files: names by the header, types by the first records of the first file that has any. The
master compares files by them while it counts, trainers parse with them: all tasks of a job get the same
types.

header, types ─► table(file, rows) ─► Arrow table: int64, uint64, float32, float64, bool, string
a value that does not fit: an error
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from trireme_shared.datasets.dataset_files import from_first_file
from trireme_shared.datasets.line_scan import RawRecords, data_start, read_raw
from trireme_shared.datasets.numbers import Misfit, check_float32, dtype_of_numbers, shown
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv

SAMPLE_RECORDS = 10_000
_TYPES = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}
_FLOATS = pa.float32(), pa.float64()
_WHOLE = re.compile(r"[-+]?[0-9]+")
_EXACT32, _EXACT64 = float(1 << 24), float(1 << 53)
_HINT = 'set its type: Csv(..., column_types={"name": "float64"}), or correct the file'


@dataclass(frozen=True, slots=True)
class Header:
    """Column names of one file, and the byte where its first record may start."""

    names: tuple[str, ...]
    start: int


class CsvColumns:
    """Of one dataset. Its methods block, and may be called from several threads."""

    def __init__(self, dataset: Csv) -> None:
        self._dataset = dataset
        self._given = {name: _TYPES[kind] for name, kind in dataset.column_types.items()}
        self._headers: dict[str, Header] = {}
        self._types: dict[str, pa.DataType] | None = None
        self._place = ""
        self._lock = Lock()

    def header(self, file: str, source: BinaryIO) -> Header:
        """Raises DatasetError; with `records=0` for an empty file."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file, source)
        return self._headers[file]

    def types(self) -> dict[str, pa.DataType]:
        """By name, of the whole dataset. Raises DatasetError if the numbers of a column fit into no type."""
        with self._lock:
            if self._types is None:
                self._types = self._found()
            return self._types

    def table(self, file: str, raw: RawRecords, names: tuple[str, ...], first: int) -> pa.Table:
        """Rows as columns of the dataset's types; `first`: number of the first row. Raises DatasetError, with
        column, value and record, for a value that does not fit."""
        types = self.types()
        chosen = self._dataset.columns or names
        try:
            table = self._parsed(file, raw, names, types, chosen)
        except pa.ArrowInvalid as error:
            raise self._misfit(file, raw, names, types, first, error) from error
        for name in chosen:
            if name not in self._given and types.get(name) in _FLOATS:
                self._check_digits(file, raw, names, first, name, table.column(name))
        return table

    def _read_header(self, file: str, source: BinaryIO) -> Header:
        start = data_start(source)
        if self._dataset.column_names is not None:
            header = Header(self._dataset.column_names, start)
        else:
            raw = read_raw(source, self._dataset, file, start, 1)
            if not len(raw):
                msg = f"{file} is empty: no header line"
                raise DatasetError(msg, hint="remove it, or give column_names", url=file, records=0)
            text = raw.record(0).decode()
            names = tuple(next(csv.reader(io.StringIO(text, newline=""), delimiter=self._dataset.delimiter)))
            header = Header(names, start + raw.ends[0] + 1)
        names = header.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DatasetError(
                f"{file} has two columns {twice!r}", hint="rename one, or give column_names", url=file
            )
        for option, wanted in (
            ("column_types={…}", self._given),
            ("columns=(…)", self._dataset.columns or ()),
        ):
            if unknown := [name for name in wanted if name not in names]:
                msg = f"{file} has no column {unknown[0]!r}; it has {', '.join(names)}"
                raise DatasetError(msg, hint=f"correct {option} in dataset()", url=file)
        return header

    def _found(self) -> dict[str, pa.DataType]:
        file, tables = from_first_file(self._dataset, self._sample)
        if not tables:
            return {}
        self._place = f"the first {tables[0].num_rows} records of {file}"
        return {name: self._kept(file, tables[0], tables[1], name) for name in tables[0].column_names}

    def _sample(self, file: str) -> tuple[pa.Table, ...]:
        """The first records with the types that Arrow sees, and as text."""
        with files.reading(file, "CSV"), scanning(file) as source:
            header = self.header(file, source)
            raw = read_raw(source, self._dataset, file, header.start, SAMPLE_RECORDS)
            if not len(raw):
                return ()
            chosen = self._dataset.columns or header.names
            texts = dict.fromkeys(header.names, pa.string())
            try:
                seen = self._parsed(file, raw, header.names, self._given, chosen)
            except pa.ArrowInvalid as error:
                raise self._misfit(file, raw, header.names, self._given, 0, error) from error
            return seen, self._parsed(file, raw, header.names, texts, chosen, nulls=True)

    def _kept(self, file: str, seen: pa.Table, texts: pa.Table, name: str) -> pa.DataType:
        """The type of a column: as `column_types` says, or by its first values. Raises DatasetError."""
        if name in self._given:
            return self._given[name]
        found = seen.schema.field(name).type
        if pa.types.is_integer(found):
            return pa.int64()
        if not pa.types.is_floating(found):
            return found if pa.types.is_boolean(found) else pa.string()
        numbers = [_number(text) for text in texts.column(name).to_pylist() if text is not None]
        try:
            return _TYPES[str(dtype_of_numbers(numbers))]
        except Misfit as error:
            number = [n for n, text in enumerate(texts.column(name).to_pylist()) if text is not None][
                error.number
            ]
            msg = f"column {name!r}: {file} record {number} has {shown(error.value)}: {error}"
            hint = (
                'read it as text: Csv(..., column_types={"name": "string"}), or as "float64", which '
                "keeps 15 digits"
            )
            raise DatasetError(msg, hint=hint, url=file, column=name) from error

    def _parsed(
        self,
        file: str,
        raw: RawRecords,
        names: tuple[str, ...],
        types: dict[str, pa.DataType],
        chosen: tuple[str, ...],
        *,
        nulls: bool = False,
    ) -> pa.Table:
        """`nulls`: what Arrow takes for a missing value is one in columns of text, too. Raises ArrowInvalid,
        DatasetError."""
        begin = raw.starts[0]
        content = raw.content[begin : raw.ends[-1]] + b"\n"
        table = arrow_csv.read_csv(
            pa.py_buffer(content),
            read_options=arrow_csv.ReadOptions(
                use_threads=False, column_names=list(names), block_size=max(len(content), 1)
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=self._dataset.delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=types,
                include_columns=[] if chosen == names else list(chosen),
                strings_can_be_null=nulls,
            ),
        )
        if table.num_rows != len(raw):
            msg = f"{file}: {len(raw)} lines were found, but they make {table.num_rows} rows"
            raise DatasetError(msg, hint=r"end each row with \n or \r\n (RFC 4180)", url=file)
        return table

    def _misfit(
        self,
        file: str,
        raw: RawRecords,
        names: tuple[str, ...],
        types: dict[str, pa.DataType],
        first: int,
        error: Exception,
    ) -> DatasetError:
        """The first value that is not of its column's type."""
        for name in self._dataset.columns or names:
            kind = types.get(name, pa.string())
            if kind == pa.string():
                continue
            try:
                self._parsed(file, raw, names, {name: kind}, (name,))
            except pa.ArrowInvalid:
                texts = (
                    self._parsed(file, raw, names, {name: pa.string()}, (name,), nulls=True)
                    .column(name)
                    .to_pylist()
                )
                number = next(
                    (n for n, text in enumerate(texts) if text is not None and not _is(text, kind)), None
                )
                if number is not None:
                    return self._refused(file, first + number, name, texts[number], kind)
        return DatasetError(f"{file} cannot be read as CSV: {error}", hint="correct the file", url=file)

    def _refused(self, file: str, number: int, name: str, value: Any, kind: pa.DataType) -> DatasetError:
        by = "column_types" if name in self._given else self._place
        msg = (
            f"column {name!r}: {file} record {number} has {shown(value)}, which does not fit "
            f"{_name(kind)}; the column is that by {by}"
        )
        return DatasetError(msg, hint=_HINT, url=file, column=name)

    def _check_digits(
        self,
        file: str,
        raw: RawRecords,
        names: tuple[str, ...],
        first: int,
        name: str,
        column: pa.ChunkedArray,
    ) -> None:
        """Whole numbers in a column of floats keep all digits. Raises DatasetError."""
        exact = _EXACT32 if column.type == pa.float32() else _EXACT64
        numbers = (chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks)  # NaN where there is none
        if not any((np.abs(each) >= exact).any() for each in numbers):
            return
        texts = (
            self._parsed(file, raw, names, {name: pa.string()}, (name,), nulls=True).column(name).to_pylist()
        )
        for number, text in enumerate(texts):
            value = None if text is None else _number(text)
            if value is None or abs(value) < exact:
                continue
            lost = isinstance(value, int) and int(float(value)) != value
            if not lost and column.type == pa.float32():
                try:
                    check_float32(np.array([value], dtype=np.float64))
                except Misfit:
                    lost = True
            if lost:
                raise self._refused(file, first + number, name, text, column.type)


def _number(text: str) -> float:
    return int(text) if _WHOLE.fullmatch(text.strip()) else float(text)


def _is(text: str, kind: pa.DataType) -> bool:
    try:
        pa.array([text.strip()]).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _name(kind: pa.DataType) -> str:
    return next(name for name, known in _TYPES.items() if known == kind)
