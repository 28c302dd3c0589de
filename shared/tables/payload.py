"""Ids and rows of all tables of a model as one payload, for a lookup, its answer, and the gradients of a lane.

    counts (n of each table, in the order of the layout) in the header; then all ids (int64), then all rows (float32), table after table

Little-endian, as everything on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import BadFrame
from shared.tables.hashing import Ids

MOST_BYTES = 256 << 20  # of one payload
ID_BYTES, NUMBER_BYTES = 8, 4

Bytes = bytes | bytearray | memoryview
Rows = npt.NDArray[np.float32]


def size_of(counts: Sequence[int], dims: Sequence[int], *, ids: bool, rows: bool) -> int:
    """Bytes of a payload of these parts. Raises BadFrame: these counts cannot be."""
    if len(counts) != len(dims) or any(count < 0 for count in counts):
        msg = f"counts {tuple(counts)[:8]} for {len(dims)} tables: expected one number of ids for each"
        raise BadFrame(msg)
    size = sum(count * (ID_BYTES * ids + NUMBER_BYTES * dim * rows) for count, dim in zip(counts, dims, strict=True))
    if size > MOST_BYTES:
        msg = f"{sum(counts)} ids in one message are {size} bytes: at most {MOST_BYTES} are taken; use a smaller minibatch"
        raise BadFrame(msg)
    return size


def joined(ids: Sequence[Ids], rows: Sequence[Rows] = ()) -> memoryview:
    """The payload."""
    return memoryview(b"".join([*(each.tobytes() for each in ids), *(each.tobytes() for each in rows)]))


def ids_in(payload: Bytes, counts: Sequence[int], dims: Sequence[int], *, rows: bool) -> list[Ids]:
    """The ids of each table, each ascending; views of the payload. Raises BadFrame."""
    view = memoryview(payload).cast("B")
    if (expected := size_of(counts, dims, ids=True, rows=rows)) != view.nbytes:
        msg = f"{view.nbytes} bytes for {sum(counts)} ids: expected {expected}"
        raise BadFrame(msg)
    found, first = [], 0
    for count in counts:
        ids = np.frombuffer(view[first : first + ID_BYTES * count], np.int64)
        if count > 1 and not (ids[1:] > ids[:-1]).all():
            msg = "ids of a table that do not ascend: each has to come once, in their order"
            raise BadFrame(msg)
        found.append(ids)
        first += ID_BYTES * count
    return found


def rows_in(payload: Bytes, counts: Sequence[int], dims: Sequence[int], *, ids: bool) -> list[Rows]:
    """The rows of each table, float32 (n, dim); views of the payload, which has the right size."""
    view, found = memoryview(payload).cast("B"), []
    first = ID_BYTES * sum(counts) if ids else 0
    for count, dim in zip(counts, dims, strict=True):
        size = NUMBER_BYTES * count * dim
        found.append(np.frombuffer(view[first : first + size], np.float32).reshape(count, dim))
        first += size
    return found
