"""The bytes of records of line formats, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from trireme_shared.datasets.line_scan import Lines, Offsets, RecordScanner, chunks

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


def read_raw(
    source: BinaryIO, dataset: Lines, file: str, start: int, count: int, most_bytes: int | None = None
) -> RawRecords:
    """Up to `count` records from byte `start` on; fewer only where the file ends, or behind `most_bytes`."""
    scanner = RecordScanner(dataset, file, start)
    source.seek(start)
    pieces: list[bytes] = []
    starts: list[int] = []
    ends: list[int] = []
    read = 0
    for chunk in chunks(source, FIRST_CHUNK_BYTES):
        pieces.append(chunk)
        found: tuple[Offsets, Offsets] = scanner.feed(chunk)
        starts += (found[0] - start).tolist()
        ends += (found[1] - start).tolist()
        read += len(chunk)
        if len(starts) >= count or (starts and most_bytes is not None and read >= most_bytes):
            break
    else:
        last = scanner.finish()
        if last is not None:
            starts.append(last[0] - start)
            ends.append(last[1] - start)
    del starts[count:], ends[count:]
    return RawRecords(b"".join(pieces)[: ends[-1] if ends else 0], starts, ends)
