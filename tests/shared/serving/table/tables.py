"""A small model with two tables, pushes of its rows, and what they have to come to."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from tests.pserver_service.jobs import JOB, PLAIN, layout_of
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.records.layout import ROWS, RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.wire.messages import HandoffPart, LookupRequest, PushBlock
from trireme_shared.serving.core.moving import ArrivingBlocks
from trireme_shared.serving.core.table.moving import ArrivingRows
from trireme_shared.tables.payload import joined

SGD = RowOptimizer(kind="sgd", lr=1.0)
INIT = RowInit(kind="constant", scale=0.5)
SPECS = (
    TableSpec(name="item", dim=2, seed=5, optimizer=SGD, init=INIT),
    TableSpec(name="user", dim=3, seed=6, optimizer=SGD, init=INIT),
)
LAYOUT = layout_of(40, optimizer=PLAIN).model_copy(update={"tables": SPECS})  # blocks of 16, 16 and 8
SIZES = (16, 16, 8)
NONE = np.empty(0, np.int64)


def ids(*some: int) -> np.ndarray:
    return np.array(some, np.int64)


def ones(keys: Sequence[np.ndarray], value: float = 1.0) -> list[np.ndarray]:
    """Gradients of these ids, of each table."""
    return [np.full((len(some), spec.dim), value, np.float32) for some, spec in zip(keys, SPECS, strict=True)]


def pushed_rows(lane: int, *keys: np.ndarray, value: float = 1.0, count: int = 2) -> tuple[PushBlock, bytes]:
    """Rows of one lane, as they are pushed."""
    counts = tuple(len(some) for some in keys)
    head = PushBlock(block=ROWS, lanes=(lane, lane + 1), count=count, rows=counts)
    return head, bytes(joined(keys, ones(keys, value)))


def whole_blocks(lanes: tuple[int, int] = (0, 4)) -> list[tuple[PushBlock, bytes]]:
    return [
        (PushBlock(block=number, lanes=lanes, count=8), bytes(bytes_of(torch.ones(size))))
        for number, size in enumerate(SIZES)
    ]


def step_of(
    keys: Iterable[np.ndarray] = (ids(1, 2), ids(7)), lanes: int = 4
) -> list[tuple[PushBlock, bytes]]:
    """A whole step, all lanes with the same ids."""
    return [*whole_blocks(), *(pushed_rows(lane, *keys) for lane in range(lanes))]


def wanted(version: int, *keys: np.ndarray, **fields: object) -> tuple[LookupRequest, memoryview]:
    counts = tuple(len(some) for some in keys)
    return LookupRequest(
        **{"job": JOB, "generation": 1, "version": version, "rows": counts, **fields}
    ), joined(keys)


def values_in(rows: memoryview, *counts: int) -> list[list[list[float]]]:
    """Of a payload of rows."""
    flat, found, first = np.frombuffer(rows, np.float32), [], 0
    for count, spec in zip(counts, SPECS, strict=True):
        found.append(flat[first : first + count * spec.dim].reshape(count, spec.dim).tolist())
        first += count * spec.dim
    return found


def carry(
    rng: random.Random,
    arriving: ArrivingRows | ArrivingBlocks,
    parts: Iterable[tuple[HandoffPart, memoryview]],
) -> None:
    """From a source to a target; some parts twice."""
    for part, payload in parts:
        copied = memoryview(bytearray(payload))
        for _ in range(rng.choice([1, 1, 2])):
            arriving.take(part, copied)
