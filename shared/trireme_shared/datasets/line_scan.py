r"""Where records begin and end in line formats: one scanner for the master, which counts, and the trainer,
which reads their bytes (`read_raw`).

    bytes --feed--> (starts, ends) of the records that ended
        --finish--> the last one, if the file has no final line break

A record is a line without its b"\n"; in CSV a line break between quotes belongs to the record. Blank lines
are records of TextLines only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, JsonLines, TextLines

Offsets = npt.NDArray[np.int64]
Lines = Csv | JsonLines | TextLines

CHUNK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ARCHIVES = (".zip", ".7z", ".tar", ".tgz")
_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_NONE = np.empty(0, dtype=np.int64)


class RecordScanner:
    """Feed it a file's bytes from the start of a record on, in pieces of any size. Offsets count from the
    file's start.

    Raises DatasetError for a quote inside an unquoted CSV field, or one that is never closed: record
    boundaries would be a guess.
    """

    def __init__(self, dataset: Lines, file: str, start: int = 0) -> None:
        self._file = file
        self._quoted = isinstance(dataset, Csv)
        self._before_quote = np.zeros(256, dtype=np.bool_)  # what may stand before a quote that opens a field
        if isinstance(dataset, Csv):
            self._before_quote[[ord(dataset.delimiter), _NEWLINE, _RETURN, _QUOTE]] = True
        self._blank = {"csv": b"\r", "json_lines": None, "text_lines": b""}[dataset.kind]
        self._keeps_blank = isinstance(dataset, TextLines)
        self._position = start
        self._record_start = start
        self._record_has_content = False
        self._in_quotes = False
        self._last_byte = _NEWLINE

    def feed(self, chunk: bytes) -> tuple[Offsets, Offsets]:
        """Starts and ends (exclusive, before the line break) of the records that end in `chunk`."""
        if not chunk:
            return _NONE, _NONE
        array = np.frombuffer(chunk, dtype=np.uint8)
        newlines = np.flatnonzero(array == _NEWLINE)
        if self._quoted:
            newlines = self._outside_quotes(array, newlines)
        self._last_byte = chunk[-1]
        base, self._position = self._position, self._position + len(chunk)
        if not len(newlines):
            self._record_has_content = self._record_has_content or self._has_content(chunk)
            return _NONE, _NONE
        ends = newlines.astype(np.int64) + base
        starts = np.concatenate(([self._record_start], ends[:-1] + 1))
        if not self._keeps_blank:
            keep = self._with_content(chunk, array, newlines)
            starts, ends = starts[keep], ends[keep]
        last = int(newlines[-1])
        self._record_start = base + last + 1
        self._record_has_content = self._has_content(chunk[last + 1 :])
        return starts, ends

    def finish(self) -> tuple[int, int] | None:
        """The last record, if the file does not end with a line break."""
        if self._in_quotes:
            msg = f"{self._file}: the record at byte {self._record_start} opens a quote that is never closed"
            raise DatasetError(
                msg, hint='close it; a quote inside a quoted field is written twice ("")', url=self._file
            )
        if self._record_start == self._position or not (self._record_has_content or self._keeps_blank):
            return None
        return self._record_start, self._position

    def _has_content(self, piece: bytes) -> bool:
        return bool(piece) if self._keeps_blank else bool(piece.strip(self._blank))

    def _with_content(
        self, chunk: bytes, array: npt.NDArray[np.uint8], newlines: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.bool_]:
        """Which of the lines that end in this chunk are not blank. Only lines that begin with white space are
        checked."""
        keep = np.ones(len(newlines), dtype=np.bool_)
        keep[0] = self._record_has_content or self._has_content(chunk[: int(newlines[0])])
        firsts = array[newlines[:-1] + 1]
        for line in np.flatnonzero(firsts <= ord(" ")):
            keep[line + 1] = self._has_content(chunk[int(newlines[line]) + 1 : int(newlines[line + 1])])
        return keep

    def _outside_quotes(
        self, array: npt.NDArray[np.uint8], newlines: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.intp]:
        """The line breaks that end a record: those with an even number of quotes before them. Updates
        `_in_quotes`."""
        quotes = np.flatnonzero(array == _QUOTE)
        carry = int(self._in_quotes)
        if len(quotes):
            opening = quotes[carry::2]
            before = array[opening - 1]
            if len(opening) and opening[0] == 0:
                before[0] = self._last_byte
            wrong = opening[~self._before_quote[before]]
            if len(wrong):
                msg = (
                    f"{self._file}: byte {self._position + int(wrong[0])} is a quote inside an unquoted field"
                )
                hint = 'quote the whole field and write its quotes twice: "5"" disk" (RFC 4180)'
                raise DatasetError(msg, hint=hint, url=self._file)
            self._in_quotes = bool((len(quotes) + carry) % 2)
        elif carry:
            return newlines[:0]
        outside: npt.NDArray[np.bool_] = (np.searchsorted(quotes, newlines) + carry) % 2 == 0
        return newlines[outside]


def chunks(file: BinaryIO, first: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The rest of `file` in pieces that double from `first` up to CHUNK_BYTES bytes."""
    size = first
    while chunk := file.read(size):
        yield chunk
        size = min(2 * size, CHUNK_BYTES)


def data_start(file: BinaryIO) -> int:
    """The first byte that is data: 3 after a UTF-8 byte order mark, else 0. Leaves `file` there."""
    file.seek(0)
    start = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
    file.seek(start)
    return start


def refuse_archive(path: str) -> None:
    """Raises DatasetError for the name of a file that holds files."""
    if path.endswith(ARCHIVES):
        msg = f"{path} is an archive of files, not lines"
        raise DatasetError(
            msg, hint="unpack it; single files may be compressed as .gz .bz2 .xz .zst", url=path
        )


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
