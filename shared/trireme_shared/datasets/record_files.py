"""Files that hold records as they are: TFRecord; RecordIO, the format of PaddlePaddle's and ElasticDL's data;
and WebDataset's tars. Where records are is for the master, which counts; what they hold is for the trainer.

TFRecord   frames: length (8 bytes), its masked CRC-32C (4), the record, its masked CRC-32C (4)
RecordIO   chunks: a head of 20 bytes, then records, which may be compressed
               head: magic 0x01020304, CRC-32 of the content, compressor (0 none, 1 Snappy, 2 gzip), bytes of
                     the content, records
               content: length (4 bytes) and bytes of each record           all numbers little-endian
tars       a record is the files of one key that follow each other: `a/0001.seg.png` has the key `a/0001` and
           the column `seg.png`.
           source --tar_records(from a record's byte)--> TarRecord(key, start, members)
           Contents are read by their places. Headers are read here, since `tarfile` takes a damaged header in
           the middle for the archive's end.
"""

from __future__ import annotations

import gzip
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from google_crc32c import value as crc32c

from trireme_shared.protocol.errors import DatasetError

_FRAME_HEAD = struct.Struct("<QI")
_FRAME_TAIL = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def masked(crc: int) -> int:
    """A CRC as it is stored: a CRC over bytes that hold CRCs is weak."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def tf_record_starts(source: BinaryIO, file: str) -> Iterator[int]:
    """The byte at which each frame starts. Raises DatasetError for a damaged or cut off one; records
    themselves are not checked."""
    position = 0
    while (length := _length(source, file, position)) is not None:
        yield position
        position += _FRAME_HEAD.size + length + _FRAME_TAIL.size
        source.seek(position - 1)
        if not source.read(1):
            raise _cut_off_frame(file, position - _FRAME_HEAD.size - length - _FRAME_TAIL.size)


def tf_record_payloads(source: BinaryIO, file: str, position: int = 0) -> Iterator[bytes]:
    """The records from byte `position` on, with their checksums compared. Raises DatasetError."""
    source.seek(position)
    while (length := _length(source, file, position)) is not None:
        content = source.read(length + _FRAME_TAIL.size)
        if len(content) < length + _FRAME_TAIL.size:
            raise _cut_off_frame(file, position)
        payload = content[:length]
        if masked(crc32c(payload)) != _FRAME_TAIL.unpack_from(content, length)[0]:
            raise _damaged_frame(file, position, "the record's checksum differs")
        yield payload
        position += _FRAME_HEAD.size + length + _FRAME_TAIL.size


def _length(source: BinaryIO, file: str, position: int) -> int | None:
    """Of the frame that starts here; None at the file's end."""
    head = source.read(_FRAME_HEAD.size)
    if not head:
        return None
    if len(head) < _FRAME_HEAD.size:
        raise _cut_off_frame(file, position)
    length, checksum = _FRAME_HEAD.unpack(head)
    if masked(crc32c(head[:8])) != checksum:
        what = (
            "the checksum of its length differs"
            if position
            else "it is no TFRecord file, or its beginning is damaged"
        )
        raise _damaged_frame(file, position, what)
    return int(length)


def _cut_off_frame(file: str, position: int) -> DatasetError:
    msg = f"{file} is cut off: the record that starts at byte {position} is not whole"
    return DatasetError(msg, hint="copy or write the file again", url=file, offset=position)


def _damaged_frame(file: str, position: int, what: str) -> DatasetError:
    msg = f"{file} is damaged at byte {position}: {what}"
    return DatasetError(msg, hint="copy or write the file again", url=file, offset=position)


MAGIC = 0x01020304
_CHUNK_HEAD = struct.Struct("<5I")
_LENGTH = struct.Struct("<I")
_PLAIN, _SNAPPY, _GZIP = range(3)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Of `records` records; its head is at byte `start` of the file."""

    start: int
    records: int


def record_io_chunks(source: BinaryIO, file: str) -> Iterator[Chunk]:
    """Every chunk of a file; only heads are read. Raises DatasetError for what is damaged or cut off."""
    position = 0
    while (head := _head(source, file, position)) is not None:
        _, _, size, records = head
        yield Chunk(position, records)
        if size:
            source.seek(position + _CHUNK_HEAD.size + size - 1)
            if not source.read(1):
                raise _damaged(file, position, "the file ends within its content")
        position += _CHUNK_HEAD.size + size


def record_io_records(source: BinaryIO, file: str, chunk: Chunk) -> list[bytes]:
    """The records of one chunk. Raises DatasetError if its checksum differs, or the records do not fill
    it."""
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
    head = source.read(_CHUNK_HEAD.size)
    if not head:
        return None
    if len(head) < _CHUNK_HEAD.size:
        raise _damaged(file, position, "the file ends within its head")
    magic, checksum, compressor, size, count = _CHUNK_HEAD.unpack(head)
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
    """Snappy's framing format: chunks of a type byte, 3 bytes of length, and content that begins with 4 bytes
    of checksum (the whole is covered by the RecordIO chunk's own)."""
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


BLOCK = 512
MOST_HEADER_BYTES = 1 << 20
_KEY = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, slots=True)
class Member:
    """A file of `size` bytes at byte `data`; `start`: byte of its first header."""

    name: str
    start: int
    data: int
    size: int


@dataclass(frozen=True, slots=True)
class TarRecord:
    """`members` by column; `start`: the byte from which `records` reads this record first."""

    key: str
    start: int
    members: dict[str, Member] = field(default_factory=dict)


def tar_records(source: BinaryIO, file: str, position: int = 0) -> Iterator[TarRecord]:
    """The records from byte `position` on. Raises DatasetError for a damaged or cut off archive, or a key
    with two files of one column."""
    record: TarRecord | None = None
    for member in tar_members(source, file, position):
        parts = _KEY.match(member.name)
        if parts is None or _META.match(member.name):
            continue
        key, column = parts[1], parts[2].lower()
        if record is None or record.key != key:
            if record is not None:
                yield record
            record = TarRecord(key, member.start)
        if column in record.members:
            msg = f"{file}: byte {member.start} is a second {column!r} of the key {key!r}"
            raise DatasetError(msg, hint="give each sample a key of its own", url=file, offset=member.start)
        record.members[column] = member
    if record is not None:
        yield record


def tar_members(source: BinaryIO, file: str, position: int = 0) -> Iterator[Member]:
    """The regular files from byte `position` on, which is that of a header. `source` may be moved between two
    of them."""
    start, long_name, long_size = position, "", -1
    while True:
        source.seek(position)
        block = source.read(BLOCK)
        if not block and position:
            msg = f"{file} is cut off: it ends at byte {position} without the end mark of a tar file"
            raise DatasetError(msg, hint="copy or write the archive again", url=file, offset=position)
        if block.count(0) == len(block):
            return
        header = _header(block, file, position)
        size = header.size if long_size < 0 else long_size
        data = position + BLOCK
        position = data - -size // BLOCK * BLOCK
        match header.type:
            case tarfile.XHDTYPE | tarfile.SOLARIS_XHDTYPE:
                extended = _extended(_content(source, file, data, header.size))
                long_name = extended.get("path", long_name)
                long_size = int(extended.get("size", long_size))
                continue
            case tarfile.GNUTYPE_LONGNAME:
                long_name = (
                    _content(source, file, data, header.size).rstrip(b"\0").decode("utf-8", "surrogateescape")
                )
                continue
            case tarfile.XGLTYPE | tarfile.GNUTYPE_LONGLINK:
                continue
            case tarfile.GNUTYPE_SPARSE:
                msg = f"{file}: byte {data - BLOCK} is a sparse file"
                raise DatasetError(msg, hint="write the archive without sparse files", url=file)
        if header.isreg():
            if size:
                source.seek(data + size - 1)
                if not source.read(1):
                    raise _cut_off(file, data - BLOCK)
            yield Member(long_name or header.name, start, data, size)
        start, long_name, long_size = position, "", -1


def _header(block: bytes, file: str, position: int) -> tarfile.TarInfo:
    if len(block) < BLOCK:
        raise _cut_off(file, position)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        msg = f"{file} is damaged at byte {position}: no header of a tar file: {error}"
        hint = "copy or write the file again" if position else "give tar files"
        raise DatasetError(msg, hint=hint, url=file, offset=position) from error


def _content(source: BinaryIO, file: str, data: int, size: int) -> bytes:
    """Of a header's extension."""
    if size > MOST_HEADER_BYTES:
        msg = f"{file} is damaged at byte {data - BLOCK}: a header of {size} bytes"
        raise DatasetError(msg, hint="copy or write the file again", url=file, offset=data - BLOCK)
    source.seek(data)
    content = source.read(size)
    if len(content) < size:
        raise _cut_off(file, data - BLOCK)
    return content


def _extended(content: bytes) -> dict[str, str]:
    """The records `length key=value` of a pax header."""
    found, position = {}, 0
    while position < len(content) and content[position]:
        digits = content[position : content.index(b" ", position)]
        end = position + int(digits)
        key, _, value = content[position + len(digits) + 1 : end - 1].partition(b"=")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
        position = end
    return found


def _cut_off(file: str, position: int) -> DatasetError:
    msg = f"{file} is cut off: the file that starts at byte {position} is not whole"
    return DatasetError(msg, hint="copy or write the archive again", url=file, offset=position)
