"""Chunks of a RecordIO file, the format of PaddlePaddle's and ElasticDL's data: a head of 20 bytes, then records, which may be compressed.

head: magic 0x01020304, CRC-32 of the content, compressor (0 none, 1 Snappy, 2 gzip), bytes of the content, records
content: length (4 bytes) and bytes of each record           all numbers little-endian
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from trireme_shared.protocol.errors import DatasetError

MAGIC = 0x01020304
_HEAD = struct.Struct("<5I")
_LENGTH = struct.Struct("<I")
_PLAIN, _SNAPPY, _GZIP = range(3)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Of `records` records; its head is at byte `start` of the file."""

    start: int
    records: int


def chunks(source: BinaryIO, file: str) -> Iterator[Chunk]:
    """Every chunk of a file; only heads are read. Raises DatasetError for what is damaged or cut off."""
    position = 0
    while (head := _head(source, file, position)) is not None:
        _, _, size, records = head
        yield Chunk(position, records)
        if size:
            source.seek(position + _HEAD.size + size - 1)
            if not source.read(1):
                raise _damaged(file, position, "the file ends within its content")
        position += _HEAD.size + size


def records(source: BinaryIO, file: str, chunk: Chunk) -> list[bytes]:
    """The records of one chunk. Raises DatasetError if its checksum differs, or the records do not fill it."""
    source.seek(chunk.start)
    head = _head(source, file, chunk.start)
    if head is None:
        raise _damaged(file, chunk.start, "the file has become shorter")
    checksum, compressor, size, count = head
    content = source.read(size)
    if len(content) < size:
        raise _damaged(file, chunk.start, "the file ends within its content")
    if zlib.crc32(content) != checksum:
        raise _damaged(file, chunk.start, "the checksum of its content differs")
    try:
        return _cut(_plain(content, compressor), count)
    except (ValueError, OSError, EOFError, struct.error, zlib.error) as error:
        raise _damaged(file, chunk.start, str(error)) from error


def _head(source: BinaryIO, file: str, position: int) -> tuple[int, int, int, int] | None:
    """(checksum, compressor, bytes, records); None at the file's end."""
    head = source.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise _damaged(file, position, "the file ends within its head")
    magic, checksum, compressor, size, count = _HEAD.unpack(head)
    if magic != MAGIC:
        raise _damaged(file, position, f"it begins with {magic:#010x}, not with {MAGIC:#010x}")
    return checksum, compressor, size, count


def _plain(content: bytes, compressor: int) -> bytes:
    if compressor == _PLAIN:
        return content
    if compressor == _GZIP:
        return gzip.decompress(content)
    if compressor == _SNAPPY:
        return _unframed(content)
    raise ValueError(f"compressor {compressor} is none of 0 (none), 1 (Snappy), 2 (gzip)")


def _unframed(content: bytes) -> bytes:
    """Snappy's framing format: chunks of a type byte, 3 bytes of length, and content that begins with 4 bytes of checksum (the whole
    is covered by the RecordIO chunk's own)."""
    import pyarrow as pa  # noqa: PLC0415  only where it is needed

    pieces, position = [], 0
    while position < len(content):
        kind = content[position]
        end = position + 4 + int.from_bytes(content[position + 1 : position + 4], "little")
        body = content[position + 8 : end]
        if kind == 0:
            pieces.append(pa.decompress(body, _plain_size(body), codec="snappy", asbytes=True))
        elif kind == 1:
            pieces.append(body)
        elif kind < 0x80:
            raise ValueError(f"a Snappy frame of unknown type {kind:#04x}")
        position = end
    return b"".join(pieces)


def _plain_size(block: bytes) -> int:
    """A Snappy block begins with its decompressed size, 7 bits a byte."""
    size = 0
    for place, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return size
    raise ValueError("a Snappy block without a size")


def _cut(content: bytes, count: int) -> list[bytes]:
    found: list[bytes] = []
    position = 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(content, position)
        position += _LENGTH.size + length
        if position > len(content):
            raise ValueError(f"record {len(found)} of {count} passes the end")
        found.append(content[position - length : position])
    if position != len(content):
        raise ValueError(f"{len(content) - position} bytes are left behind {count} records")
    return found


def _damaged(file: str, position: int, what: str) -> DatasetError:
    msg = f"{file} is damaged: the chunk at byte {position}: {what}"
    return DatasetError(msg, hint="copy or write the file again", url=file, offset=position)
