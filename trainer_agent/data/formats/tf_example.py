"""tf.train.Example without TensorFlow and protobuf: three levels of messages, of which only lists of values matter.

Example.features (1) ─► Features.feature (1, a map) ─► key (1), Feature (2) ─► bytes_list (1) | float_list (2) | int64_list (3)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

_BYTES = 2
_UNSIGNED = 1 << 64


def example(content: bytes, lists: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Feature -> value, or an array (float32, int64) or list (bytes) of values if there is not exactly one, or its name is in `lists`.
    Features are in the order of their names. Raises ValueError for what is no Example."""
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
