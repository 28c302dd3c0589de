"""One block: its values, the values of the version before, the tree of its next step, and its optimizer.

    version s --push of step s--> tree --[0, lanes) whole--> previous = current, current = stepped
                                         |                   `-> version s + 1
                                         `-> held, if the gradient is clipped
                                               --norm of the whole gradient--> stepped

A buffer that a step leaves as it was keeps its memory too, and `changed` tells since when.

A step writes into the buffer of the version before, if nobody reads that: a block has exactly two, so the
headers that say where its values lie come again every second version and are recognised
(trireme_shared.protocol.wire.codec).

Pull of version v: `current` or `previous`; above TOO_EARLY; below GONE.

Accumulator is the canonical tree of one block: nodes over aligned intervals of lanes wait until [0, lanes) is
whole.

    add([a, b)) --siblings combine upwards--> ... --> [0, lanes) --> Whole

The tree fixes the order of arithmetic, whatever the order of arrival. The first contribution is kept (copied,
if its memory may not be kept), later ones are combined with it. Two that may only be read are combined into
memory of the tree, so neither is copied. A larger interval replaces the smaller ones inside it, which have
the same bits. If gradients are sent in a narrower dtype, every node is rounded to it where it is computed
(trireme_shared.blocks.buffers.round_to).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trireme_shared.blocks.buffer_mean import Mean, bits_of, first_lane
from trireme_shared.blocks.buffers import Buffer, BufferPool, round_to
from trireme_shared.blocks.gradient_norm import squares_of
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.lanes import Interval, combine, parent, sibling
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Block
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options


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
    """The nodes of one block's next step that wait for their siblings. `mean`: combines two of them, as
    trireme_shared.protocol.lanes.combine. `keeps_root`: the root stays in the tree, in memory of its own,
    until `take_root`."""

    def __init__(
        self,
        pool: BufferPool,
        lanes: int,
        dtype: str,
        elements: int,
        mean: Mean = combine,
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
        """Add a node that is not covered. Returns the root if this completes the tree (release it after use,
        unless it is kept), else None.

        `value` is used during the call (until the root is released) and may be overwritten. `memory`: the
        buffer that is all of `value`; it is retained if the node has to wait. `payload`: the dtype that it
        was sent in (None: its own). `lent`: the value may only be read; the same holds for the root's if the
        root is `lent`. If it waits in `memory`, `keep` copies it.
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
        """Take over a reference: the next root shall be there, as far as it can, so that where it lies comes
        again."""
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
        if self._mean is first_lane:  # the left side stays where it is, also in memory that is lent
            right.release()
            left.count += right.count
            return left
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


class BlockState:
    """Values change by swapping buffers, so a reader that retained one goes on reading the old values.

    `changed`: the version that brought the current bits (asynchronous: see Store.changes). `frozen`: it is on
    its way to another parameter server, so it takes no push and goes on answering pulls. `freeze_at`: the
    version that freezes it. `holds`: a whole gradient waits for `settle`. `since`: the version that it was
    initialised or loaded at. `squares`: the sum of the squares of the last whole gradient, if that was held
    or `measured`. `mean`: how two nodes of its tree become one."""

    def __init__(
        self,
        place: Block,
        values: Buffer,
        pool: BufferPool,
        lanes: int,
        optimizer: BlockOptimizer | None,
        version: int = 0,
        *,
        holds: bool = False,
        mean: Mean = combine,
    ) -> None:
        self.place = place
        self.version = self.since = version
        self.changed = version
        self.current = values
        self.previous: Buffer | None = None
        self.updates = 0
        self.frozen = False
        self.freeze_at: int | None = None
        self._pool = pool
        self._optimizer = optimizer
        self.squares: float | None = None
        self._holds = holds
        self.tree = Accumulator(pool, lanes, place.dtype, place.elements, mean, keeps_root=holds)

    def __repr__(self) -> str:
        return f"<BlockState {self.place.number} version {self.version}: {self.tree!r}>"

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter: no optimizer steps it."""
        return self._optimizer is None

    @property
    def is_stepped(self) -> bool:
        """Whether its values are parameters, which are stepped here."""
        return self._optimizer is not None

    def is_empty_at(self, version: int | None) -> bool:  # noqa: ARG002
        """Whether it has no values at `version`: only where blocks are of gradients, and the step had no
        data."""
        return False

    @property
    def narrows(self) -> bool:
        """Whether it may be sent in a narrower dtype (see
        trireme_shared.protocol.records.layout.Segment.travels_as)."""
        return self._optimizer is not None and self.place.dtype == "float32"

    def push(
        self,
        step: int,
        lanes: Interval,
        value: torch.Tensor | None,
        count: int,
        options: Options,
        memory: Buffer | None = None,
        payload: Narrow | None = None,
        *,
        lent: bool = False,
        measured: bool = False,
    ) -> Verdict:
        """Add a node to the tree of step `step`. `value` (None with count 0), `memory`, `payload`, `lent`:
        see Accumulator.add."""
        if self.version > step or (self.version == step and self.tree.covers(lanes)):
            return Verdict.DUPLICATE
        if self.version < step:
            return Verdict.TOO_EARLY
        if value is not None and not self.tree.agrees(payload or self.place.dtype):
            return Verdict.LAYOUT_MISMATCH
        whole = self.tree.add(lanes, value if count else None, count, memory, payload, lent=lent)
        if whole is not None:
            self.squares = None
            if (self._holds or measured) and not self.is_buffer:
                self.squares = 0.0 if whole.value is None else squares_of(whole.value)
            if not self._holds:
                self._advance(whole, options)
        return Verdict.APPLIED

    @property
    def held(self) -> bool:
        """Whether it has the whole gradient of its step, and waits for `settle`."""
        return self._holds and self.tree.root is not None

    def settle(self, factor: float | None, options: Options) -> None:
        """Step it with the gradient that is held, multiplied by `factor` (one rounded operation for each
        number); None: without any gradient."""
        whole = self.tree.take_root()
        if factor is None:
            whole.release()
            whole = Node(None, 0)
        elif whole.value is not None and not self.is_buffer and factor != 1.0:
            whole.value.mul_(factor)
        self._advance(whole, options)

    def _advance(self, whole: Node, options: Options) -> None:
        """The next version, made of a whole gradient."""
        own = None
        if whole.lent and whole.value is not None and not self._only_reads(options):
            own = self.copied(whole.value)
        stepped = self._stepped(whole.value if own is None else own.tensor, options)
        whole.release()
        if own is not None:
            own.release()
        self._drop_previous()
        self.previous, self.current = self.current, stepped
        self.previous.forget_narrowed()
        self.version += 1
        if self.current is not self.previous:
            self.changed = self.version
        self.frozen = self.version == self.freeze_at

    def _only_reads(self, options: Options) -> bool:
        """Whether a step leaves the memory of its gradient as it is."""
        return self._optimizer is None or self._optimizer.only_reads(options)

    def copied(self, value: torch.Tensor) -> Buffer:
        """A copy, for the caller to release."""
        own = self._pool.take(self.place.dtype, self.place.elements)
        own.tensor.copy_(value)
        return own

    def pull(self, version: int) -> Buffer | Verdict:
        """The values of `version` (the caller retains them to keep them), TOO_EARLY or GONE."""
        if version == self.version:
            return self.current
        if version == self.version - 1 and self.previous is not None:
            return self.previous
        return Verdict.TOO_EARLY if version > self.version else Verdict.GONE

    def update(self, value: torch.Tensor | None, options: Options) -> None:
        """Asynchronous: apply a gradient at once; in place if nobody reads the values. A buffer takes over
        the value, or adds it if it holds integers."""
        if value is not None and self._optimizer is not None and self.current.references == 1:
            self.current.forget_narrowed()
            self._optimizer.step(self.current.tensor, value, options)
            self.updates += 1
        else:
            if value is not None and self.is_buffer and not value.is_floating_point():
                value = self.current.tensor + value
            replaced, self.current = self.current, self._stepped(value, options)
            replaced.release()
        self.version += 1

    def ahead_of(self, version: int) -> int:
        """Asynchronous: by how many versions it is ahead of that one. Of a version from before it was loaded,
        which counted otherwise: by those since then."""
        return self.version - max(version, self.since)

    def takes(self, step: int | None) -> bool:
        """Whether a push may change it. `step` None: asynchronous."""
        return not self.frozen or (step is not None and step < self.version)

    def carry_on(self, version: int, updates: int, previous: Buffer | None, since: int = 0) -> None:
        """It was stepped elsewhere until now; `previous` is its own from now on."""
        self.version, self.updates, self.previous, self.since = version, updates, previous, since
        self.changed = version

    def let_go(self) -> None:
        """Another parameter server has it now: its memory is given back."""
        self._drop_previous()
        self.current.release()

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Not copies: they are valid until the next step."""
        return {} if self._optimizer is None else self._optimizer.state()

    def add_state(self, name: str, payload: memoryview) -> bool:
        """Copy what its optimizer starts with; whether it has such a state."""
        return self._optimizer is not None and self._optimizer.add_state(name, payload)

    def _stepped(self, value: torch.Tensor | None, options: Options) -> Buffer:
        """The next values, in a buffer with a reference of its own; the current one if there is no data or,
        for a buffer, no change."""
        if value is None or (
            self._optimizer is None and torch.equal(bits_of(value), bits_of(self.current.tensor))
        ):
            return self.current.retain()
        values = self._other_buffer()
        if self._optimizer is None:
            values.tensor.copy_(value)
        else:
            self._optimizer.step_into(values.tensor, self.current.tensor, value, options)
            self.updates += 1
        return values

    def _other_buffer(self) -> Buffer:
        """For the next values: that of the version before, which the step makes unavailable, or another
        one."""
        if self.previous is not None and self.previous.references == 1:
            taken, self.previous = self.previous, None
            taken.forget_narrowed()
            return taken
        return self._pool.take(self.place.dtype, self.place.elements)

    def _drop_previous(self) -> None:
        if self.previous is not None:
            self.previous.release()
            self.previous = None


def add_state(blocks: Mapping[int, BlockState], number: int, name: str, payload: memoryview) -> None:
    """Copy a tensor of the state that a block's optimizer starts with. Raises BadFrame if it is not one of
    those that it has."""
    block = blocks.get(number)
    if block is None or not block.add_state(name, payload):
        msg = (
            f"state {name!r} of block {number}, {payload.nbytes} bytes: no such block, or its "
            "optimizer has no such state"
        )
        raise BadFrame(msg)
