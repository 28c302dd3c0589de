"""Text and JSON lines: seek to the first record's byte, read until there are enough records, parse them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, BinaryIO

from shared.datasets.line_scan import Lines, Offsets, RecordScanner, chunks, data_start, refuse_archive
from shared.errors import DatasetError
from shared.records.datasets import JsonLines, TextLines
from shared.storage import files
from shared.storage.compressed import Decompressed
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Record, RecordShard, Shard

FIRST_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RawRecords:
    """`content` from the first record's start; `starts` and `ends` of each record in it."""

    content: bytes
    starts: list[int]
    ends: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, number: int) -> bytes:
        return self.content[self.starts[number] : self.ends[number]]


def read_raw(source: BinaryIO, dataset: Lines, file: str, start: int, count: int) -> RawRecords:
    """Up to `count` records from byte `start` on; fewer only where the file ends."""
    scanner = RecordScanner(dataset, file, start)
    source.seek(start)
    pieces: list[bytes] = []
    starts: list[int] = []
    ends: list[int] = []
    for chunk in chunks(source, FIRST_CHUNK_BYTES):
        pieces.append(chunk)
        found: tuple[Offsets, Offsets] = scanner.feed(chunk)
        starts += (found[0] - start).tolist()
        ends += (found[1] - start).tolist()
        if len(starts) >= count:
            break
    else:
        last = scanner.finish()
        if last is not None:
            starts.append(last[0] - start)
            ends.append(last[1] - start)
    del starts[count:], ends[count:]
    return RawRecords(b"".join(pieces)[: ends[-1] if ends else 0], starts, ends)


def read_range(
    source: BinaryIO, dataset: Lines, file: str, first: int, count: int, offset: int | None, skip: int
) -> RawRecords:
    """Records [first, first + count): read from byte `offset`, or from byte `skip`, where record 0 starts, if that is None."""
    start, before = (offset, 0) if offset is not None else (skip, first)
    raw = read_raw(source, dataset, file, start, before + count)
    if len(raw) < before + count:
        raise too_short(file, first, count, len(raw) + first - before)
    return RawRecords(raw.content, raw.starts[before:], raw.ends[before:])


class LineReader:
    """TextLines and JsonLines."""

    def __init__(self, dataset: TextLines | JsonLines) -> None:
        self._dataset = dataset
        self._content = Decompressed()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        refuse_archive(file)
        with files.reading(file, self._dataset.kind), self._content.opened(file) as source:
            raw = read_range(source, self._dataset, file, first, count, offset, data_start(source))
            if isinstance(self._dataset, TextLines):
                return Shard({"text": [_text(file, first + n, raw.record(n)) for n in range(count)]}, count)
            return RecordShard([_json(file, first + n, raw.record(n)) for n in range(count)])


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
        raise DatasetError(msg, hint='JsonLines needs one object a line, like {"x": 1.5, "label": 3}', url=file)
    return value
