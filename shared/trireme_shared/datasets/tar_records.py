"""Records of a WebDataset tar: files of one key that follow each other. `a/0001.seg.png` has the key `a/0001` and the column `seg.png`.

    source --records(from a record's byte)--> TarRecord(key, start, members)        contents are read by their places

Headers are read here, since `tarfile` takes a damaged header in the middle for the archive's end. Their checksums are compared.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from trireme_shared.protocol.errors import DatasetError

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


def records(source: BinaryIO, file: str, position: int = 0) -> Iterator[TarRecord]:
    """The records from byte `position` on. Raises DatasetError for a damaged or cut off archive, or a key with two files of one column."""
    record: TarRecord | None = None
    for member in members(source, file, position):
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


def members(source: BinaryIO, file: str, position: int = 0) -> Iterator[Member]:
    """The regular files from byte `position` on, which is that of a header. `source` may be moved between two of them."""
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
                long_name = _content(source, file, data, header.size).rstrip(b"\0").decode("utf-8", "surrogateescape")
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
