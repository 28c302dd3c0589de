"""Text and JSON lines: seek to the first record's byte, read until there are enough records, parse them."""

from __future__ import annotations

import contextlib
import json
from threading import Lock
from typing import Any, BinaryIO

from trainer_agent.data.reader import ColumnTypes, too_short
from trainer_agent.data.shard import Record, Shard
from trireme_shared.datasets.dataset_files import from_first_file
from trireme_shared.datasets.line_scan import Lines, RawRecords, data_start, read_raw, refuse_archive
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed, scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import JsonLines, TextLines


def read_range(
    source: BinaryIO, dataset: Lines, file: str, first: int, count: int, offset: int | None, skip: int
) -> RawRecords:
    """Records [first, first + count): read from byte `offset`, or from byte `skip`, where record 0 starts, if
    that is None."""
    start, before = (offset, 0) if offset is not None else (skip, first)
    raw = read_raw(source, dataset, file, start, before + count)
    if len(raw) < before + count:
        raise too_short(file, first, count, len(raw) + first - before)
    return RawRecords(raw.content, raw.starts[before:], raw.ends[before:])


SAMPLE_RECORDS, SAMPLE_BYTES = 1_000, 16 << 20


class LineReader:
    """TextLines and JsonLines."""

    def __init__(self, dataset: TextLines | JsonLines) -> None:
        self._dataset = dataset
        self._content = Decompressed()
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        refuse_archive(file)
        with files.reading(file, self._dataset.kind), self._content.opened(file) as source:
            raw = read_range(source, self._dataset, file, first, count, offset, data_start(source))
            if isinstance(self._dataset, TextLines):
                return Shard({"text": [_text(file, first + n, raw.record(n)) for n in range(count)]}, count)
        records = [_json(file, first + n, raw.record(n)) for n in range(count)]
        return self._column_types(self._dataset).shard(records, file, range(first, first + count))

    def _column_types(self, dataset: JsonLines) -> ColumnTypes:
        """From the first file with records, so that all trainers use the same."""
        with self._lock:
            if self._types is None:
                file, sample = from_first_file(dataset, self._sample)
                place = f"the first {len(sample)} records of {file}"
                advice = (
                    'set it: JsonLines(..., column_types={"name": "float64"}), or define collate(records)'
                )
                self._types = ColumnTypes(sample, place, advice, dataset.column_types)
            return self._types

    def _sample(self, file: str) -> list[Record]:
        """Without the records that are damaged: the tasks that have them tell that."""
        with files.reading(file, self._dataset.kind), scanning(file) as source:
            raw = read_raw(source, self._dataset, file, data_start(source), SAMPLE_RECORDS, SAMPLE_BYTES)
        found = []
        for number in range(len(raw)):
            with contextlib.suppress(DatasetError):
                found.append(_json(file, number, raw.record(number)))
        return found


def _text(file: str, number: int, line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        msg = f"{file} record {number} is not UTF-8: byte {line[error.start]:#04x} at position {error.start}"
        raise DatasetError(msg, hint="convert the file to UTF-8", url=file) from error


def _json(file: str, number: int, line: bytes) -> Record:
    try:
        value: Any = json.loads(_text(file, number, line))
    except ValueError as error:
        msg = f"{file} record {number} is not JSON: {error}: {line[:60]!r}"
        raise DatasetError(msg, hint="JsonLines needs one JSON object a line", url=file) from error
    if not isinstance(value, dict):
        msg = f"{file} record {number} is a JSON {type(value).__name__}, not an object: {line[:60]!r}"
        raise DatasetError(
            msg, hint='JsonLines needs one object a line, like {"x": 1.5, "label": 3}', url=file
        )
    return value
