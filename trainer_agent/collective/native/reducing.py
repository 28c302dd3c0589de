"""The mean gradients of a bucket, blocks that travel in one operation, in one native group, two ways. These functions block: they run in the group's own thread.

canonical  all to all: each trainer gets its part of all nodes ─► the canonical tree ─► all gather: the same bits whoever trains
fast       each trainer adds up its nodes, weighted ─► all reduce: all trainers have the same bits, which depend on who they are

Memory of results is the caller's; nodes are only read. `group` None: this trainer is alone. What lies between is in memory that is used again: new memory
costs more than the arithmetic (a fault for each page).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64

from trainer_agent.collective.native.given import ChosenNode
from trireme_shared.blocks.buffer_mean import combine_buffers
from trireme_shared.blocks.buffers import bytes_of, tensor_over
from trireme_shared.blocks.narrow import DTYPES, cast_into, round_to
from trireme_shared.collective.group import Group
from trireme_shared.protocol.lanes import Interval, combine
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Block, Layout

Payloads = Mapping[Interval, Sequence[memoryview]]
"""Of this trainer's chosen nodes: each block of a bucket."""
Value = tuple[torch.Tensor | None, int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """`dtype`: of the blocks; `narrow`: the one in which they travel, if it is another."""

    blocks: tuple[Block, ...]
    dtype: str
    narrow: Narrow | None

    @property
    def numbers(self) -> list[int]:
        return [block.number for block in self.blocks]

    @property
    def elements(self) -> int:
        return sum(block.elements for block in self.blocks)

    @property
    def travels(self) -> torch.dtype:
        return DTYPES[self.narrow or self.dtype]

    def described(self) -> str:
        return f"{self.blocks[0].number} to {self.blocks[-1].number}, {self.elements} x {self.narrow or self.dtype}"


def buckets_of(layout: Layout, payloads: Sequence[Narrow | None], bucket_bytes: int) -> list[Bucket]:
    """Of all parameters. The last layers first. `payloads[block]`: the narrower dtype in which it travels, if any. A block that is larger than a bucket
    has one to itself."""
    found: list[Bucket] = []
    waiting: dict[tuple[str, Narrow | None], list[Block]] = {}
    sizes: dict[tuple[str, Narrow | None], int] = {}
    trained = [block for block in layout.blocks() if layout.segments[block.segment].kind == "param"]
    for block in reversed(trained):
        kind = block.dtype, payloads[block.number]
        size = block.elements * DTYPES[kind[1] or kind[0]].itemsize
        if kind in waiting and sizes[kind] + size > bucket_bytes:
            found.append(Bucket(tuple(waiting.pop(kind)), *kind))
            sizes[kind] = 0
        waiting.setdefault(kind, []).append(block)
        sizes[kind] = sizes.get(kind, 0) + size
    return found + [Bucket(tuple(blocks), *kind) for kind, blocks in waiting.items()]


def buffers_of(layout: Layout) -> list[Block]:
    """What is no parameter: running means, counters."""
    return [block for block in layout.blocks() if layout.segments[block.segment].kind != "param"]


def _nothing() -> None:
    """No phase."""


class Scratch:
    """Memory that operations of one group use again, by use. Of one thread at a time; what it gives is valid until the same use is asked for again."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<Scratch: {sum(each.numel() for each in self._memory.values()) >> 20} MiB>"

    def take(self, use: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Of that shape; its values are whatever was there."""
        size = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.numel() < size:
            memory = self._memory[use] = torch.empty(size, dtype=torch.uint8)
        return memory[:size].view(dtype).view(shape)


def canonical(
    group: Group | None,
    bucket: Bucket,
    nodes: Sequence[ChosenNode],
    payloads: Payloads,
    outs: Sequence[torch.Tensor],
    scratch: Scratch,
    limit_s: float,
) -> None:
    """Write the mean of each block into `outs`. `limit_s`: of each operation. Raises Broken, OverflowError."""
    size, travels = (1, bucket.travels) if group is None else (group.size, bucket.travels)
    part = -(-bucket.elements // size)
    rank = 0 if group is None else group.rank
    mine = [node for node in nodes if node.rank == rank and node.count]
    given = scratch.take("given", travels, size, len(mine), part)
    alone = len(mine) == 1  # its parts lie one behind the other
    flat = given.view(-1) if alone else scratch.take("flat", travels, size * part)
    flat[bucket.elements :] = 0
    for place, node in enumerate(mine):
        pack(bucket, payloads[node.lanes], flat)
        if not alone:
            given[:, place] = flat.view(size, part)
    full = [node for node in nodes if node.count]
    by_rank = [sum(node.rank == each for node in full) for each in range(size)]
    taken = scratch.take("taken", travels, len(full), part)
    if group is None:
        taken = given.view(len(full), part)
    else:
        there = group.data_device
        bytes_of_part = part * travels.itemsize
        moved = _raw(taken).to(there)
        sizes = [count * bytes_of_part for count in by_rank]
        group.scatter_all(_raw(given).to(there), moved, limit_s, _nothing, sizes)
        taken = moved.to("cpu").view(travels).view(len(full), part)
    order = sorted(full, key=lambda node: (node.rank, node.lanes))
    found: dict[Interval, Value] = {node.lanes: (None, 0) for node in nodes}
    for node, value in zip(order, taken, strict=True):
        found[node.lanes] = value.to(DTYPES[bucket.dtype]), node.count
    root = (0, max(node.lanes[1] for node in nodes))
    narrow = DTYPES[bucket.narrow] if bucket.narrow is not None else None
    whole, _ = mean_over(found, root, combine, narrow)
    assert whole is not None
    share = whole
    if narrow is not None:
        share = torch.empty(part, dtype=narrow)
        cast_into(share, whole)
    result = share
    if group is not None:
        gathered = _raw(scratch.take("gathered", travels, size * part)).to(group.data_device)
        group.gather_all(_raw(share).to(group.data_device), gathered, limit_s)
        result = gathered.to("cpu").view(travels)
    unpack(result, outs)


def fast(
    group: Group | None,
    bucket: Bucket,
    nodes: Sequence[ChosenNode],
    payloads: Payloads,
    outs: Sequence[torch.Tensor],
    scratch: Scratch,
    limit_s: float,
) -> int:
    """As `canonical`; answers a digest of the result as it came. Raises Broken, OverflowError."""
    rank = 0 if group is None else group.rank
    total = sum(node.count for node in nodes)
    wide = DTYPES[bucket.dtype]
    flat = scratch.take("sum", wide, bucket.elements).zero_()
    packed = scratch.take("flat", bucket.travels, bucket.elements)
    for node in nodes:
        if node.rank == rank and node.count:
            pack(bucket, payloads[node.lanes], packed)
            flat.add_(packed.to(wide), alpha=node.count / total)
    result = flat
    if bucket.narrow is not None:
        result = packed
        cast_into(result, flat)
    if group is not None:
        moved = result.to(group.data_device)
        group.allreduce([moved], limit_s, _nothing)
        result = moved.to("cpu")
    unpack(result, outs)
    return xxh3_64(bytes_of(result)).intdigest() >> 1


def mean_over(
    nodes: Mapping[Interval, Value], root: Interval, mean: Callable[..., Any], narrow: torch.dtype | None = None
) -> Value:
    """Over the canonical tree, as Accumulator: the same order, the same rounding. In place: nodes are overwritten. `narrow`: what every node is rounded to."""
    if root in nodes:
        return nodes[root]
    middle = (root[0] + root[1]) // 2
    left, left_count = mean_over(nodes, (root[0], middle), mean, narrow)
    right, right_count = mean_over(nodes, (middle, root[1]), mean, narrow)
    if left is None or right is None:
        return (left, left_count) if right is None else (right, right_count)
    value, count = mean(left, left_count, right, right_count)
    if narrow is not None:
        round_to(value, torch.empty_like(value, dtype=narrow))
    return value, count


def mean_of_buffer(
    block: Block, current: torch.Tensor, nodes: Sequence[ChosenNode], payloads: Mapping[Interval, bytes]
) -> torch.Tensor | None:
    """Of one block of buffers; None: no lane had data. An empty payload: as it is."""
    found: dict[Interval, Value] = {}
    for node in nodes:
        value = None
        if node.count:
            data = payloads[node.lanes]
            value = tensor_over(memoryview(bytearray(data)), block.dtype) if data else current.clone()
        found[node.lanes] = value, node.count
    return mean_over(found, (0, max(node.lanes[1] for node in nodes)), combine_buffers)[0]


def pack(bucket: Bucket, payloads: Sequence[memoryview], flat: torch.Tensor) -> None:
    """The blocks of one node, one behind the other."""
    first = 0
    for block, payload in zip(bucket.blocks, payloads, strict=True):
        flat[first : first + block.elements] = tensor_over(payload, bucket.narrow or bucket.dtype)
        first += block.elements


def unpack(flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    first = 0
    for out in outs:
        out.copy_(flat[first : first + out.numel()])
        first += out.numel()


def _raw(values: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: what is moved keeps every bit, and every backend has bytes."""
    return values.contiguous().view(-1).view(torch.uint8)
