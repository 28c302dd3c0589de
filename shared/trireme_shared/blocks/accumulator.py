"""The canonical tree of one block: nodes over aligned intervals of lanes wait until [0, lanes) is whole.

    add([a, b)) --siblings combine upwards--> ... --> [0, lanes) --> Whole

The tree fixes the order of arithmetic, whatever the order of arrival. The first contribution is kept (copied, if its memory may
not be kept), later ones are combined with it. Two that may only be read are combined into memory of the tree, so neither is copied. A larger interval replaces the smaller ones inside it, which have the same bits.
If gradients are sent in a narrower dtype, every node is rounded to it where it is computed (trireme_shared.blocks.buffers.round_to).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trireme_shared.blocks.buffers import Buffer, BufferPool, round_to
from trireme_shared.protocol.lanes import Interval, combine, parent, sibling


@dataclass(slots=True)
class Node:
    """`buffer` None: the memory of `value` belongs to the caller. An empty node has no value and count 0."""

    value: torch.Tensor | None
    count: int
    buffer: Buffer | None = None
    lent: bool = False

    def release(self) -> None:
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None


class Accumulator:
    """The nodes of one block's next step that wait for their siblings. `mean`: combines two of them, as trireme_shared.protocol.lanes.combine.
    `keeps_root`: the root stays in the tree, in memory of its own, until `take_root`."""

    def __init__(
        self,
        pool: BufferPool,
        lanes: int,
        dtype: str,
        elements: int,
        mean: Callable[..., tuple[Any, int]] = combine,
        *,
        keeps_root: bool = False,
    ) -> None:
        self._mean, self._keeps_root = mean, keeps_root
        self.nodes: dict[Interval, Node] = {}
        self._pool = pool
        self._root = (0, lanes)
        self._dtype, self._elements = dtype, elements
        self._spare: Buffer | None = None  # for the next root, if roots are made in memory of the tree
        self._makes_roots = False
        self._payload: str | None = None  # the dtype that the waiting data was sent in

    def __repr__(self) -> str:
        return f"<Accumulator of {self._root[1]} lanes: {sorted(self.nodes)}>"

    def covers(self, lanes: Interval) -> bool:
        """Whether [a, b) is in the tree already, alone or inside a larger node."""
        return bool(self.nodes) and any(first <= lanes[0] and lanes[1] <= last for first, last in self.nodes)

    def agrees(self, payload: str) -> bool:
        """Whether data sent as `payload` may join the data that waits: one step of a block has one dtype."""
        return self._payload in (None, payload)

    def add(
        self,
        lanes: Interval,
        value: torch.Tensor | None,
        count: int,
        memory: Buffer | None = None,
        payload: str | None = None,
        *,
        lent: bool = False,
    ) -> Node | None:
        """Add a node that is not covered. Returns the root if this completes the tree (release it after use, unless it is kept),
        else None.

        `value` is used during the call (until the root is released) and may be overwritten. `memory`: the buffer that is all
        of `value`; it is retained if the node has to wait. `payload`: the dtype that it was sent in (None: its own).
        `lent`: the value may only be read; the same holds for the root's if the root is `lent`. If it waits in `memory`, `keep` copies it.
        """
        if self.nodes:
            self._supersede(lanes)
        if value is not None:
            self._payload = payload or self._dtype
        node = Node(value, count, lent=lent and value is not None)
        while lanes != self._root and (other := self.nodes.pop(sibling(lanes), None)) is not None:
            on_left = lanes[0] < sibling(lanes)[0]
            lanes = parent(lanes)
            node = self._combined(node, other, lanes) if on_left else self._combined(other, node, lanes)
        if lanes == self._root:
            self._payload = None
            if not self._keeps_root:
                return node
        if node.value is not None and node.buffer is None:
            if memory is None or (lanes == self._root and node.lent):
                self._own(node)
            else:
                node.buffer = memory.retain()
        self.nodes[lanes] = node
        return node if lanes == self._root else None

    @property
    def root(self) -> Node | None:
        """The root that was kept."""
        return self.nodes.get(self._root)

    def take_root(self) -> Node:
        """The root that was kept leaves the tree; release it after use."""
        return self.nodes.pop(self._root)

    def keep(self) -> None:
        """Copy what waits in memory that was lent, and give that back."""
        for node in self.nodes.values():
            if node.lent:
                self._own(node)

    def reuse(self, buffer: Buffer) -> None:
        """Take over a reference: the next root shall be there, as far as it can, so that where it lies comes again."""
        if self._spare is not None or buffer.references > 1 or not self._makes_roots:
            buffer.release()
        else:
            buffer.forget_narrowed()
            self._spare = buffer

    def clear(self) -> None:
        """Forget all data of the step, and give back what was for its root."""
        if self._spare is not None:
            self._spare.release()
        self._spare, self._makes_roots = None, False
        for node in self.nodes.values():
            node.release()
        self.nodes.clear()
        self._payload = None

    def _supersede(self, lanes: Interval) -> None:
        for inside in [node for node in self.nodes if lanes[0] <= node[0] and node[1] <= lanes[1]]:
            self.nodes.pop(inside).release()

    def _combined(self, left: Node, right: Node, lanes: Interval) -> Node:
        """One node, of `lanes`, of two. It keeps the memory of the result; the other memory is released."""
        if left.value is None or right.value is None:
            return left if right.value is None else right
        if left.lent and right.lent:
            if left.count == right.count and left.value.is_floating_point() and self._mean is combine:
                return self._rounded(self._halved(left, right, lanes))
            self._own(right)
        reader, written = (left, right) if left.lent else (right, left)
        if reader.lent and left.count == right.count and left.value.is_floating_point():
            assert written.value is not None
            assert reader.value is not None
            # a + b is b + a
            written.value, written.count = self._mean(written.value, left.count, reader.value, right.count)
            reader.release()
            return self._rounded(written)
        if reader.lent:
            self._own(reader)
        assert left.value is not None
        assert right.value is not None
        value, count = self._mean(left.value, left.count, right.value, right.count)
        kept, given_up = (left, right) if value is left.value else (right, left)
        given_up.release()
        return self._rounded(Node(value, count, kept.buffer))

    def _halved(self, left: Node, right: Node, lanes: Interval) -> Node:
        """As trireme_shared.protocol.lanes.combine of equal counts, into memory of its own."""
        assert left.value is not None
        assert right.value is not None
        made, self._makes_roots = None, self._makes_roots or lanes[0] == 0
        if lanes[0] == 0:
            made, self._spare = self._spare, None
        if made is None:
            made = self._pool.take(self._dtype, self._elements)
        torch.add(left.value, right.value, out=made.tensor).mul_(0.5)
        left.release()
        right.release()
        return Node(made.tensor, left.count + right.count, made)

    def _rounded(self, node: Node) -> Node:
        """Rounded to the dtype that the data was sent in."""
        if node.value is not None and self._payload is not None and self._payload != self._dtype:
            scratch = self._pool.take(self._payload, self._elements)
            round_to(node.value, scratch.tensor)
            scratch.release()
        return node

    def _own(self, node: Node) -> None:
        """Copy a value whose memory may not be kept."""
        assert node.value is not None
        own = self._pool.take(self._dtype, self._elements)
        own.tensor.copy_(node.value)
        node.release()
        node.buffer, node.value, node.lent = own, own.tensor, False
