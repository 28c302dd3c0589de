"""What trainers give to one step of a native exchange: nodes of the tree, by lanes.

pushes of this trainer ─► Given: nodes, each with its blocks as backward finishes them ─► told to all ─► chosen: the largest nodes, each once

The memory of a block stays the compute's: it is read until the step is over.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from trireme_shared.collective.group import Broken
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader


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
    """Nodes that have each lane once, in the order of lanes: the largest first, of the lowest rank. Two nodes of the tree are apart, or one is within
    the other. Raises Broken: lanes are missing."""
    offers = [(node, rank, each.headers[node.header]) for rank, each in enumerate(told) for node in each.nodes]
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
