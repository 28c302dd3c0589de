"""safetensors files as streams: written without a second copy in memory, read in one pass that also gives the
checksum.

    8 bytes: length of the header | header (JSON: name -> dtype, shape, offsets; __metadata__) | tensors, one
    after the other

The format is that of the safetensors library: each can read the other's files. Everything blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, BinaryIO, Protocol

from xxhash import xxh3_128

from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.direct_file import DirectFile
from trireme_shared.protocol.errors import BadFrame

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
DTYPES = {code: dtype for dtype, code in CODES.items()}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8


class Checksum(Protocol):
    """Of all bytes that went through `update`."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


DEFAULT_CHECKSUM = "xxh3-128"
# XXH3 finds damage, which is what checksums are for here, and costs next to nothing; the others are for those
# who must have them
CHECKSUMS: Mapping[str, Callable[[], Checksum]] = {
    DEFAULT_CHECKSUM: xxh3_128,
    "md5": partial(hashlib.md5, usedforsecurity=False),
    "sha256": hashlib.sha256,
}

Sink = Callable[["Entry"], memoryview | None]
Made = Callable[[memoryview | None], memoryview]
"""A tensor that is made when it is written: in the given memory, which is as large as it and begins at a
multiple of 8 bytes, or, without any, in its own. The memory that it answers with is read before the next one
is made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; [first, last) is its place after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int = 0
    last: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts about a file that was completely written or read."""

    checksum: str  # of all bytes: its name in CHECKSUMS, ":" and hexadecimal digits
    bytes: int
    metadata: Mapping[str, str]


def write(
    url: str,
    metadata: Mapping[str, str],
    tensors: Sequence[tuple[Entry, memoryview | Made]],
    rest: Callable[[], None] = lambda: None,
    checksum: str = DEFAULT_CHECKSUM,
) -> Summary:
    """Write all or nothing under `url`. Wide elements come first, so that each lies at a multiple of its
    size. `rest` is called after each chunk; an exception it raises ends the writing. `checksum`: a name in
    CHECKSUMS. A tensor may be a function that makes it when it is written; of elements of one width they are
    written in the given order. Raises OSError, and what such a function raises."""
    ordered = sorted(tensors, key=lambda item: -ITEM_BYTES[item[0].dtype])
    head = _header(metadata, [entry for entry, _ in ordered])
    digest = CHECKSUMS[checksum]()
    with files.write_atomic(url) as file:
        lender = file if isinstance(file, DirectFile) else None

        def put(piece: memoryview, *, there: bool = False) -> None:
            for start in range(0, piece.nbytes, CHUNK_BYTES):
                part = piece[start : start + CHUNK_BYTES]
                digest.update(part)  # this also loads it into the processor's cache
                if not there:
                    file.write(part)
                rest()

        put(memoryview(head))
        for entry, made in ordered:
            if not callable(made):
                put(made)
            elif lender is not None and (place := lender.lend(entry.bytes)) is not None:
                put(made(place), there=True)
                lender.give_back(entry.bytes)
            else:
                put(made(None))
    size = len(head) + sum(entry.bytes for entry, _ in ordered)
    return Summary(f"{checksum}:{digest.hexdigest()}", size, metadata)


def read(url: str, sink: Sink, checksum: str = DEFAULT_CHECKSUM) -> Summary:
    """Read the whole file once. Each tensor goes into the memory that `sink` returns; None skips it.
    `checksum`: see `write`.

    Raises BadFrame for a file of another format, OSError. Use the memory's content only if the checksum is
    right.
    """
    head: list[memoryview] = []
    with files.open_read(url) as file:
        metadata, entries, size = _read_header(file, head.append)
        size += sum(entry.bytes for entry in entries)
        digest = CHECKSUMS[checksum]()
        for piece in head:
            digest.update(piece)
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for entry in entries:
            place = sink(entry)
            for start in range(0, entry.bytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, entry.bytes - start)
                piece = scratch[:count] if place is None else place[start : start + count]
                fill(file, piece, f"tensor {entry.name!r}")
                digest.update(piece)
        if file.read(1):
            raise BadFrame(f"{url} goes on after its last tensor, at byte {size}")
        return Summary(f"{checksum}:{digest.hexdigest()}", size, metadata)


def read_header(url: str) -> tuple[dict[str, str], list[Entry], int]:
    """Metadata, tensors in their order, and the bytes in front of the first. Raises BadFrame for a file of
    another format, OSError."""
    with files.open_read(url) as file:
        return _read_header(file, lambda _: None)


def _header(metadata: Mapping[str, str], entries: Sequence[Entry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    first = 0
    for entry in entries:
        last = first + entry.bytes
        table[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_header(
    file: BinaryIO, seen: Callable[[memoryview], None]
) -> tuple[dict[str, str], list[Entry], int]:
    length = memoryview(bytearray(_LENGTH_BYTES))
    fill(file, length, "the header's length")
    count = int.from_bytes(length, "little")
    if count > MAX_HEADER_BYTES:
        raise BadFrame(f"a header of {count} bytes: at most {MAX_HEADER_BYTES} are allowed")
    text = memoryview(bytearray(count))
    fill(file, text, "the header")
    seen(length)
    seen(text)
    try:
        table = json.loads(bytes(text))
        metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
        entries = [
            Entry(
                name, DTYPES[item["dtype"]], tuple(map(int, item["shape"])), *map(int, item["data_offsets"])
            )
            for name, item in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFrame(f"the header is not that of a safetensors file: {error!r}") from error
    entries.sort(key=lambda entry: (entry.first, entry.last))
    end = 0
    for entry in entries:
        if (
            entry.first != end
            or entry.last - entry.first != entry.bytes
            or any(side < 0 for side in entry.shape)
        ):
            raise BadFrame(
                f"tensor {entry.name!r} of shape {entry.shape} lies at [{entry.first}, "
                f"{entry.last}) after {end}"
            )
        end = entry.last
    return metadata, entries, _LENGTH_BYTES + count


def fill(file: BinaryIO, place: memoryview, what: str) -> None:
    """Read so many bytes. Raises BadFrame: the file ends before."""
    filled = 0
    while filled < place.nbytes:
        # typing's BinaryIO lacks it, files have it
        count = file.readinto(place[filled:])  # type: ignore[attr-defined]
        if not count:
            raise BadFrame(f"the file ends inside {what}: {place.nbytes - filled} bytes are missing")
        filled += count
