"""TFRecord and RecordIO: binary records, one after the other or in chunks."""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from threading import Lock
from typing import BinaryIO, TypeVar

from trainer_agent.data.column_types import ColumnTypes
from trainer_agent.data.formats.tf_example import example
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Record, Shard
from trireme_shared.datasets import record_files
from trireme_shared.datasets.dataset_files import from_first_file
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed, scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import RecordIO, TFRecord

SAMPLE_RECORDS = 100

T = TypeVar("T")


def chosen(found: Iterator[T], file: str, first: int, count: int, offset: int | None) -> list[T]:
    """Records [first, first + count) of `found`, which begins at `offset`, or at the file's start if that is None."""
    number = first if offset is not None else 0
    kept = []
    for record in islice(found, first - number + count):
        if number >= first:
            kept.append(record)
        number += 1
    if len(kept) < count:
        raise too_short(file, first, count, number)
    return kept


class TFRecordReader:
    def __init__(self, dataset: TFRecord) -> None:
        self._dataset, self._lists = dataset, frozenset(dataset.lists)
        self._content = Decompressed()
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        with files.reading(file, "TFRecord"), self._content.opened(file) as source:
            found = chosen(record_files.tf_record_payloads(source, file, offset or 0), file, first, count, offset)
        if self._dataset.decode == "bytes":
            return Shard({"bytes": found}, count)
        records = [self._example(file, first + n, payload) for n, payload in enumerate(found)]
        return self._column_types().shard(records, file, first)

    def _column_types(self) -> ColumnTypes:
        """From the first file with records, so that all trainers use the same."""
        with self._lock:
            if self._types is None:
                file, sample = from_first_file(self._dataset, self._sample)
                advice = (
                    "write each feature with one type (lists: TFRecord(..., lists=(...))), or define collate(records)"
                )
                self._types = ColumnTypes(sample, f"the first {len(sample)} records of {file}", advice)
            return self._types

    def _sample(self, file: str) -> list[Record]:
        with files.reading(file, "TFRecord"), scanning(file) as source:
            payloads = list(islice(record_files.tf_record_payloads(source, file), SAMPLE_RECORDS))
        found = []
        for number, payload in enumerate(payloads):
            with contextlib.suppress(DatasetError):  # the task that has it tells that
                found.append(self._example(file, number, payload))
        return found

    def _example(self, file: str, number: int, payload: bytes) -> Record:
        try:
            return example(payload, self._lists)
        except ValueError as error:
            msg = f"{file} record {number} is not a tf.train.Example: {error}"
            raise DatasetError(msg, hint='TFRecord(…, decode="bytes") gives records as they are', url=file) from error


class RecordIOReader:
    """Keeps where the chunks of each file begin (16 bytes a chunk), and the records of the chunk read last."""

    def __init__(self, dataset: RecordIO) -> None:  # noqa: ARG002  as other readers
        self._chunks: dict[str, tuple[array[int], array[int]]] = {}
        self._last: tuple[str, int, list[bytes]] = ("", -1, [])
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock, files.reading(file, "RecordIO"), files.open_read(file) as source:
            starts, ends = self._index(file, source)
            if not ends or first + count > ends[-1]:
                raise too_short(file, first, count, ends[-1] if ends else 0)
            found: list[bytes] = []
            number = bisect_right(ends, first)
            while len(found) < count:
                before = ends[number - 1] if number else 0
                if self._last[:2] != (file, number):
                    chunk = record_files.Chunk(starts[number], ends[number] - before)
                    self._last = file, number, record_files.record_io_records(source, file, chunk)
                begin = max(first - before, 0)
                found += self._last[2][begin : begin + count - len(found)]
                number += 1
        return Shard({"bytes": found}, count)

    def _index(self, file: str, source: BinaryIO) -> tuple[array[int], array[int]]:
        """(byte of each chunk, number of the record behind it)."""
        if file not in self._chunks:
            starts, ends, records = array("q"), array("q"), 0
            for chunk in record_files.record_io_chunks(source, file):
                if chunk.records:
                    records += chunk.records
                    starts.append(chunk.start)
                    ends.append(records)
            self._chunks[file] = starts, ends
        return self._chunks[file]
