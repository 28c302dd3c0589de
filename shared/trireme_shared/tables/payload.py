"""Ids and rows of all tables of a model as one payload, for a lookup, its answer, and the gradients of a
lane.

    counts (n of each table, in the order of the layout) in the header; then all ids (int64), then all rows
    (float32), table after table

Rows may be cast to bfloat16 or float16, as blocks are (shared/trireme_shared/blocks/buffers.py).
Little-endian, as everything on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from trireme_shared.blocks.buffers import DTYPES, cast_into
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.tables.hashing import Ids

MOST_BYTES = 256 << 20  # of one payload
ID_BYTES, NUMBER_BYTES, NARROW_BYTES = 8, 4, 2

Bytes = bytes | bytearray | memoryview
Rows = npt.NDArray[np.float32]


def size_of(
    counts: Sequence[int], dims: Sequence[int], *, ids: bool, rows: bool, dtype: Narrow | None = None
) -> int:
    """Bytes of a payload of these parts. `dtype`: of the rows, if it is not float32. Raises BadFrame: these
    counts cannot be."""
    if len(counts) != len(dims) or any(count < 0 for count in counts):
        msg = f"counts {tuple(counts)[:8]} for {len(dims)} tables: expected one number of ids for each"
        raise BadFrame(msg)
    number = _number_bytes(dtype) * rows
    size = sum(count * (ID_BYTES * ids + number * dim) for count, dim in zip(counts, dims, strict=True))
    if size > MOST_BYTES:
        msg = (
            f"{sum(counts)} ids in one message are {size} bytes: at most {MOST_BYTES} are taken; use a "
            "smaller minibatch"
        )
        raise BadFrame(msg)
    return size


def joined(
    ids: Sequence[Ids],
    rows: Sequence[Rows] = (),
    dtype: Narrow | None = None,
    memory: Callable[[int], memoryview] | None = None,
) -> memoryview:
    """The payload. `memory`: gives so many bytes for it. Raises OverflowError: a value is beyond float16."""
    parts = [_bytes_of(each) for each in ids]
    parts += [_bytes_of(each) if dtype is None else narrowed(each, dtype) for each in rows]
    if memory is None:
        return memoryview(b"".join(parts))
    whole, first = memory(sum(part.nbytes for part in parts)), 0
    for part in parts:
        whole[first : first + part.nbytes] = part
        first += part.nbytes
    return whole


def _bytes_of(array: Ids | Rows) -> memoryview:
    """A view, if the array is contiguous."""
    found: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return found


def narrowed(values: Rows, dtype: Narrow) -> memoryview:
    """float32 of any shape -> its bytes in a narrower dtype. Raises OverflowError: a value is beyond
    float16."""
    narrow = torch.empty(values.size, dtype=DTYPES[dtype])
    cast_some(narrow, values.reshape(-1))
    return narrow_bytes(narrow)


def cast_some(narrow: torch.Tensor, values: Rows) -> None:
    """`narrow` = `values`, float32 (n,). Raises OverflowError: a value is beyond float16."""
    if values.size:
        cast_into(narrow, torch.from_numpy(values))


def narrow_bytes(narrow: torch.Tensor) -> memoryview:
    """Of a tensor in a narrow dtype, (n,)."""
    found: memoryview = narrow.view(torch.int16).numpy().data
    return found.cast("B")


def _widened(values: memoryview, dtype: Narrow) -> Rows:
    """float32 (n,): the same numbers."""
    if dtype == "float16":
        return np.frombuffer(values, np.float16).astype(np.float32)
    return (np.frombuffer(values, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _number_bytes(dtype: Narrow | None) -> int:
    return NUMBER_BYTES if dtype is None else NARROW_BYTES


def ids_in(
    payload: Bytes, counts: Sequence[int], dims: Sequence[int], *, rows: bool, dtype: Narrow | None = None
) -> list[Ids]:
    """The ids of each table, each ascending; views of the payload. Raises BadFrame."""
    view = memoryview(payload).cast("B")
    if (expected := size_of(counts, dims, ids=True, rows=rows, dtype=dtype)) != view.nbytes:
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


def rows_in(
    payload: Bytes, counts: Sequence[int], dims: Sequence[int], *, ids: bool, dtype: Narrow | None = None
) -> list[Rows]:
    """The rows of each table, float32 (n, dim), of a payload that has the right size; views of it, if they
    are float32 there."""
    view, found = memoryview(payload).cast("B"), []
    first = ID_BYTES * sum(counts) if ids else 0
    for count, dim in zip(counts, dims, strict=True):
        size = _number_bytes(dtype) * count * dim
        part = view[first : first + size]
        rows = np.frombuffer(part, np.float32) if dtype is None else _widened(part, dtype)
        found.append(rows.reshape(count, dim))
        first += size
    return found
