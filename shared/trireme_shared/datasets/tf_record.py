"""Frames of a TFRecord file: length (8 bytes), its masked CRC-32C (4), the record, its masked CRC-32C (4).

source --starts--> byte of each frame, for the master, which counts          --payloads--> records, for the trainer
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from google_crc32c import value as crc32c

from trireme_shared.protocol.errors import DatasetError

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def masked(crc: int) -> int:
    """A CRC as it is stored: a CRC over bytes that hold CRCs is weak."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def starts(source: BinaryIO, file: str) -> Iterator[int]:
    """The byte at which each frame starts. Raises DatasetError for a damaged or cut off one; records themselves are not checked."""
    position = 0
    while (length := _length(source, file, position)) is not None:
        yield position
        position += _HEAD.size + length + _TAIL.size
        source.seek(position - 1)
        if not source.read(1):
            raise _cut_off(file, position - _HEAD.size - length - _TAIL.size)


def payloads(source: BinaryIO, file: str, position: int = 0) -> Iterator[bytes]:
    """The records from byte `position` on, with their checksums compared. Raises DatasetError."""
    source.seek(position)
    while (length := _length(source, file, position)) is not None:
        content = source.read(length + _TAIL.size)
        if len(content) < length + _TAIL.size:
            raise _cut_off(file, position)
        payload = content[:length]
        if masked(crc32c(payload)) != _TAIL.unpack_from(content, length)[0]:
            raise _damaged(file, position, "the record's checksum differs")
        yield payload
        position += _HEAD.size + length + _TAIL.size


def _length(source: BinaryIO, file: str, position: int) -> int | None:
    """Of the frame that starts here; None at the file's end."""
    head = source.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise _cut_off(file, position)
    length, checksum = _HEAD.unpack(head)
    if masked(crc32c(head[:8])) != checksum:
        what = (
            "the checksum of its length differs" if position else "it is no TFRecord file, or its beginning is damaged"
        )
        raise _damaged(file, position, what)
    return int(length)


def _cut_off(file: str, position: int) -> DatasetError:
    msg = f"{file} is cut off: the record that starts at byte {position} is not whole"
    return DatasetError(msg, hint="copy or write the file again", url=file, offset=position)


def _damaged(file: str, position: int, what: str) -> DatasetError:
    msg = f"{file} is damaged at byte {position}: {what}"
    return DatasetError(msg, hint="copy or write the file again", url=file, offset=position)
