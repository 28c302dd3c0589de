"""The canonical tree of one block: nodes over aligned intervals of lanes wait until [0, lanes) is whole.

    add([a, b)) --siblings combine upwards--> ... --> [0, lanes) --> Whole

The order of arithmetic is fixed by the tree, never by arrival. The first contribution is copied, later ones are combined
into it; a larger interval replaces the smaller ones inside it, which carry the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pserver_service.core.buffers import Buffer, BufferPool
from shared.lanes import Interval, combine, parent, sibling


@dataclass(slots=True)
class Node:
    """`buffer` None: `value` is borrowed (or there is none: an empty node, count 0)."""

    value: torch.Tensor | None
    count: int
    buffer: Buffer | None = None

    def release(self) -> None:
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None


class Accumulator:
    def __init__(self, pool: BufferPool, lanes: int, dtype: str, elements: int) -> None:
        self.nodes: dict[Interval, Node] = {}
        self._pool = pool
        self._root = (0, lanes)
        self._dtype, self._elements = dtype, elements

    def __repr__(self) -> str:
        return f"<Accumulator of {self._root[1]} lanes: {sorted(self.nodes)}>"

    def covers(self, lanes: Interval) -> bool:
        """Whether [a, b) is there already, alone or inside a larger node."""
        return any(first <= lanes[0] and lanes[1] <= last for first, last in self.nodes)

    def add(self, lanes: Interval, value: torch.Tensor | None, count: int) -> Node | None:
        """Put a node in that is not covered; the whole tree's node if this completes it (release it after use).

        `value` is borrowed for the call (until the whole node is released) and may be overwritten.
        """
        self._supersede(lanes)
        node = Node(value, count)
        while lanes != self._root and (other := self.nodes.pop(sibling(lanes), None)) is not None:
            on_left = lanes[0] < sibling(lanes)[0]
            node = _combine(node, other) if on_left else _combine(other, node)
            lanes = parent(lanes)
        if lanes == self._root:
            return node
        if node.value is not None and node.buffer is None:
            node.buffer = self._pool.take(self._dtype, self._elements)
            node.buffer.tensor.copy_(node.value)
            node.value = node.buffer.tensor
        self.nodes[lanes] = node
        return None

    def _supersede(self, lanes: Interval) -> None:
        for inside in [node for node in self.nodes if lanes[0] <= node[0] and node[1] <= lanes[1]]:
            self.nodes.pop(inside).release()


def _combine(left: Node, right: Node) -> Node:
    """One node of two; it keeps the memory that the result lies in, the other's is released."""
    if left.value is None or right.value is None:
        return left if right.value is None else right
    value, count = combine(left.value, left.count, right.value, right.count)
    kept, given_up = (left, right) if value is left.value else (right, left)
    given_up.release()
    return Node(value, count, kept.buffer)
