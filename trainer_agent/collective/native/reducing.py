"""What trainers give to one step of a native exchange, and its mean gradients: nodes of the tree, reduced in
buckets of blocks that travel in one operation.

    pushes of this trainer ─► Given: nodes, each with its blocks as backward finishes them ─► told to all
        ─► chosen: the largest nodes, each once
    canonical  all to all: each trainer gets its part of all nodes ─► the canonical tree
        ─► all gather: the same bits whoever trains
    fast       each trainer adds up its nodes, weighted
        ─► all reduce: all trainers have the same bits, which depend on who they are

The memory of a block stays the compute's: it is read until the step is over. The functions that reduce block:
they run in the group's own thread. Memory of results is the caller's; nodes are only read. `group` None: this
trainer is alone. What lies between is in memory that is used again: new memory costs more than the arithmetic
(a fault for each page).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from xxhash import xxh3_64

from trireme_shared.blocks.buffer_mean import Mean
from trireme_shared.blocks.buffers import DTYPES, bytes_of, cast_into, round_to, tensor_over
from trireme_shared.collective.group import Broken, Group
from trireme_shared.protocol.lanes import Interval, combine
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader

Payloads = Mapping[Interval, Sequence[memoryview]]
"""Of this trainer's chosen nodes: each block of a bucket."""
Value = tuple[torch.Tensor | None, int]


class ToldNode(Record):
    """`header`: its place in `Told.headers`."""

    lanes: Interval
    count: int
    header: int
    result: NodeResult | None = None


class Told(Record):
    """What one trainer says of its nodes of a step before anybody sends any gradient."""

    step: int
    headers: tuple[PushHeader, ...]
    nodes: tuple[ToldNode, ...]

    def to_bytes(self) -> bytes:
        """With NaN and infinities: a loss may be one."""
        return json.dumps(self.model_dump(mode="json")).encode()


@dataclass(slots=True)
class GivenNode:
    """`blocks`: those that are finished. `count`: its records, known with the first one."""

    header: PushHeader
    count: int
    result: NodeResult | None = None
    blocks: dict[int, tuple[PushBlock, memoryview]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChosenNode:
    """`rank`: of the trainer that gives it."""

    lanes: Interval
    count: int
    rank: int
    header: PushHeader
    result: NodeResult | None


class Given:
    """Of this trainer, in one step and one generation."""

    def __init__(self, step: int, generation: int) -> None:
        self.step, self.generation = step, generation
        self.nodes: dict[Interval, GivenNode] = {}
        self._over = False
        self._more = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Given to step {self.step} in generation {self.generation}: {sorted(self.nodes)}>"

    def add(self, header: PushHeader, item: PushBlock, payload: memoryview) -> None:
        node = self.nodes.get(item.lanes)
        if node is None:
            node = self.nodes[item.lanes] = GivenNode(header, item.count)
        node.result = node.result or item.result
        node.blocks[item.block] = item, memoryview(payload).cast("B")
        self._more.set()

    def end(self) -> None:
        """Its memory is used otherwise: whoever waits for more of it gets Broken."""
        self._over = True
        self._more.set()

    async def begun(self, lanes: Interval) -> None:
        """Until a block of each of these lanes is there."""
        while not covers(list(self.nodes), lanes):
            await self._next()

    async def finished(self, nodes: Sequence[Interval], blocks: Sequence[int]) -> None:
        """Until these blocks of these nodes are there."""
        while not all(block in self.nodes[node].blocks for node in nodes for block in blocks):
            await self._next()

    async def _next(self) -> None:
        if not self._over:
            self._more.clear()
            await self._more.wait()
        if self._over:
            raise Broken(f"step {self.step} begins again")

    def payloads(self, lanes: Interval, blocks: Sequence[int]) -> list[memoryview]:
        """Of a node's blocks, which are finished."""
        node = self.nodes[lanes]
        return [node.blocks[block][1] for block in blocks]

    def told(self) -> Told:
        headers: list[PushHeader] = []
        nodes = []
        for lanes, node in sorted(self.nodes.items()):
            if node.header not in headers:
                headers.append(node.header)
            place = headers.index(node.header)
            nodes.append(ToldNode(lanes=lanes, count=node.count, header=place, result=node.result))
        return Told(step=self.step, headers=tuple(headers), nodes=tuple(nodes))


def covers(nodes: Sequence[Interval], lanes: Interval) -> bool:
    """Whether nodes, which may overlap, have all of these lanes."""
    there = {lane for first, last in nodes for lane in range(first, last)}
    return there.issuperset(range(*lanes))


def read_told(data: Sequence[bytes], step: int) -> list[Told]:
    """By rank. Raises Broken if one of them is of another step, or cannot be read."""
    found = []
    for rank, each in enumerate(data):
        try:
            told = Told.model_validate(json.loads(each))
        except (ValidationError, ValueError) as error:
            raise Broken(f"rank {rank} says what cannot be read: {str(error)[:200]}") from None
        if told.step != step or any(not 0 <= node.header < len(told.headers) for node in told.nodes):
            raise Broken(f"rank {rank} is in step {told.step}, and this trainer in {step}")
        found.append(told)
    return found


def chosen(told: Sequence[Told], lanes: int) -> list[ChosenNode]:
    """Nodes that have each lane once, in the order of lanes: the largest first, of the lowest rank. Two nodes
    of the tree are apart, or one is within the other. Raises Broken: lanes are missing."""
    offers = [
        (node, rank, each.headers[node.header]) for rank, each in enumerate(told) for node in each.nodes
    ]
    offers.sort(key=lambda offer: (offer[0].lanes[0] - offer[0].lanes[1], offer[0].lanes, offer[1]))
    taken: set[int] = set()
    found = []
    for node, rank, header in offers:
        if taken.isdisjoint(range(*node.lanes)):
            taken.update(range(*node.lanes))
            found.append(ChosenNode(node.lanes, node.count, rank, header, node.result))
    if missing := sorted(set(range(lanes)) - taken):
        raise Broken(f"nobody gives lane {missing[0]} of step {told[0].step}")
    return sorted(found, key=lambda node: node.lanes)


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
        return (
            f"{self.blocks[0].number} to {self.blocks[-1].number}, {self.elements} x "
            f"{self.narrow or self.dtype}"
        )


def buckets_of(layout: Layout, payloads: Sequence[Narrow | None], bucket_bytes: int) -> list[Bucket]:
    """Of all parameters. The last layers first. `payloads[block]`: the narrower dtype in which it travels, if
    any. A block that is larger than a bucket has one to itself."""
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
    """Memory that operations of one group use again, by use. Of one thread at a time; what it gives is valid
    until the same use is asked for again."""

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
    """Write the mean of each block into `outs`. `limit_s`: of each operation. Raises Broken,
    OverflowError."""
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
    nodes: Mapping[Interval, Value],
    root: Interval,
    mean: Callable[..., Any],
    narrow: torch.dtype | None = None,
) -> Value:
    """Over the canonical tree, as Accumulator: the same order, the same rounding. In place: nodes are
    overwritten. `narrow`: what every node is rounded to."""
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
    block: Block,
    current: torch.Tensor,
    nodes: Sequence[ChosenNode],
    payloads: Mapping[Interval, bytes],
    mean: Mean,
) -> torch.Tensor | None:
    """Of one block of buffers, by `mean` of its kind; None: no lane had data. An empty payload: as it
    is."""
    found: dict[Interval, Value] = {}
    for node in nodes:
        value = None
        if node.count:
            data = payloads[node.lanes]
            value = tensor_over(memoryview(bytearray(data)), block.dtype) if data else current.clone()
        found[node.lanes] = value, node.count
    return mean_over(found, (0, max(node.lanes[1] for node in nodes)), mean)[0]


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
