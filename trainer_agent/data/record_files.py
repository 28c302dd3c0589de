"""Files of binary records, one after the other, in chunks, or as members of tar files: TFRecord, RecordIO,
WebDataset.

A tf.train.Example is read without TensorFlow and protobuf: three levels of messages, of which only lists of
values matter.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from threading import Lock
from typing import Any, BinaryIO, TypeVar

import numpy as np

from trainer_agent.data import images
from trainer_agent.data.reader import ColumnTypes, too_short
from trainer_agent.data.shard import Record, Shard
from trireme_shared.datasets import record_files
from trireme_shared.datasets.dataset_files import from_first_file
from trireme_shared.datasets.record_files import Member, TarRecord, tar_records
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed, scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import RecordIO, TFRecord, WebDataset

SAMPLE_RECORDS = 100
T = TypeVar("T")
_BYTES = 2
_UNSIGNED = 1 << 64
_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")


class TFRecordReader:
    def __init__(self, dataset: TFRecord) -> None:
        self._dataset, self._lists = dataset, frozenset(dataset.lists)
        self._content = Decompressed()
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        with files.reading(file, "TFRecord"), self._content.opened(file) as source:
            found = chosen(
                record_files.tf_record_payloads(source, file, offset or 0), file, first, count, offset
            )
        if self._dataset.decode == "bytes":
            return Shard({"bytes": found}, count)
        records = [self._example(file, first + n, payload) for n, payload in enumerate(found)]
        return self._column_types().shard(records, file, range(first, first + count))

    def _column_types(self) -> ColumnTypes:
        """From the first file with records, so that all trainers use the same."""
        with self._lock:
            if self._types is None:
                file, sample = from_first_file(self._dataset, self._sample)
                advice = (
                    "write each feature with one type (lists: TFRecord(..., lists=(...))), or define "
                    "collate(records)"
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
            raise DatasetError(
                msg, hint='TFRecord(…, decode="bytes") gives records as they are', url=file
            ) from error


class RecordIOReader:
    """Keeps where the chunks of each file begin (16 bytes a chunk), and the records of the chunk read
    last."""

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


def chosen(found: Iterator[T], file: str, first: int, count: int, offset: int | None) -> list[T]:
    """Records [first, first + count) of `found`, which begins at `offset`, or at the file's start if that is
    None."""
    number = first if offset is not None else 0
    kept = []
    for record in islice(found, first - number + count):
        if number >= first:
            kept.append(record)
        number += 1
    if len(kept) < count:
        raise too_short(file, first, count, number)
    return kept


class WebDatasetReader:
    def __init__(self, dataset: WebDataset) -> None:
        self._dataset, self._decode, self._size = dataset, dataset.decode, dataset.image_size
        self._content = Decompressed()
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        with files.reading(file, "a tar file"), self._content.opened(file) as source:
            found = chosen(tar_records(source, file, offset or 0), file, first, count, offset)
            samples = [self._record(source, file, record) for record in found]
        return self._column_types().shard(samples, file, range(first, first + count))

    def _column_types(self) -> ColumnTypes:
        """From the first file with samples, so that all trainers use the same."""
        with self._lock:
            if self._types is None:
                file, first = from_first_file(self._dataset, self._sample)
                advice = "write the files of a column with one type and no gap, or define collate(records)"
                self._types = ColumnTypes(first, f"the first sample of {file}", advice)
            return self._types

    def _sample(self, file: str) -> list[Record]:
        with files.reading(file, "a tar file"), scanning(file) as source:
            return [self._record(source, file, record) for record in islice(tar_records(source, file), 1)]

    def _record(self, source: BinaryIO, file: str, record: TarRecord) -> Record:
        values = {name: self._value(source, file, name, member) for name, member in record.members.items()}
        return {"__key__": record.key, **values}

    def _value(self, source: BinaryIO, file: str, column: str, member: Member) -> Any:
        source.seek(member.data)
        content = source.read(member.size)
        suffix = column.rpartition(".")[2]
        if not self._decode:
            return content
        if suffix in images.SUFFIXES:
            return images.decoded(content, self._size, file, f"{member.name} (byte {member.data})")
        try:
            if suffix in _NUMBERS:
                return int(content)
            if suffix in _TEXTS:
                return content.decode()
            if suffix == "json":
                return json.loads(content)
            if suffix == "npy":
                return np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            msg = f"{file}: {member.name} (byte {member.data}) cannot be read as {suffix}: {error}"
            raise DatasetError(
                msg, hint="correct it, or read bytes: WebDataset(…, decode=False)", url=file
            ) from error
        return content


def example(content: bytes, lists: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Feature -> value, or an array (float32, int64) or list (bytes) of values if there is not exactly one,
    or its name is in `lists`. Features are in the order of their names. Raises ValueError for what is no
    Example."""
    found: dict[str, Any] = {}
    view = memoryview(content)
    for field, features in _fields(view):
        if field != 1 or not isinstance(features, memoryview):
            continue
        for number, entry in _fields(features):
            if number == 1 and isinstance(entry, memoryview):
                name, feature = "", memoryview(b"")
                for part, value in _fields(entry):
                    if isinstance(value, memoryview):
                        name, feature = (str(value, "utf-8"), feature) if part == 1 else (name, value)
                found[name] = _value(feature, name in lists)
    return {name: found[name] for name in sorted(found)}


def _value(feature: memoryview, keep_list: bool) -> Any:
    for kind, content in _fields(feature):
        if not isinstance(content, memoryview):
            continue
        values: Any
        match kind:
            case 1:
                values = [bytes(value) for _, value in _fields(content) if isinstance(value, memoryview)]
            case 2:
                values = np.concatenate([_floats(value) for _, value in _fields(content)] or [_floats(b"")])
            case 3:
                values = np.array(
                    [number for _, value in _fields(content) for number in _integers(value)], dtype=np.int64
                )
            case _:
                continue
        if len(values) != 1 or keep_list:
            return values
        return values[0] if kind == 1 else values[0].item()
    return None


def _floats(value: memoryview | bytes | int) -> Any:
    """Packed, or one alone."""
    content = struct.pack("<I", value) if isinstance(value, int) else value
    return np.frombuffer(content, dtype="<f4")


def _integers(value: memoryview | int) -> Iterator[int]:
    if isinstance(value, int):
        yield _signed(value)
        return
    position = 0
    while position < len(value):
        number, position = _varint(value, position)
        yield _signed(number)


def _signed(number: int) -> int:
    return number - _UNSIGNED if number >= _UNSIGNED >> 1 else number


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """(number, value) of a message's fields."""
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        size = 0
        match tag & 7:
            case 0:
                number, position = _varint(content, position)
                yield tag >> 3, number
                continue
            case 1:
                size = 8
            case 2:
                size, position = _varint(content, position)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"a field of unknown type {kind} at byte {position}")
        if position + size > len(content):
            raise ValueError(f"a field of {size} bytes passes the end at byte {position}")
        piece = content[position : position + size]
        yield tag >> 3, int.from_bytes(piece, "little") if tag & 7 != _BYTES else piece
        position += size


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = 0
    for place in range(10):
        if position + place >= len(content):
            break
        byte = content[position + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & (_UNSIGNED - 1), position + place + 1
    raise ValueError(f"a number without an end at byte {position}")
