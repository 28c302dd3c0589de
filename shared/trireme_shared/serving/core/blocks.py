"""One block: its values, the values of the version before, the tree of its next step, and its optimizer.

    version s --push of step s--> tree --[0, lanes) whole--> previous = current, current = stepped, version s + 1
                                         `-> held, if the gradient is clipped --norm of the whole gradient--> stepped

A buffer that a step leaves as it was keeps its memory too, and `changed` tells since when.

A step writes into the buffer of the version before, if nobody reads that: a block has exactly two, so the headers that say
where its values lie come again every second version and are recognised (trireme_shared.protocol.wire.codec).

Pull of version v: `current` or `previous`; above TOO_EARLY; below GONE.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trireme_shared.blocks.accumulator import Accumulator, Node
from trireme_shared.blocks.buffer_mean import bits_of, combine_buffers
from trireme_shared.blocks.buffers import Buffer, BufferPool
from trireme_shared.blocks.gradient_norm import squares_of
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.lanes import Interval, combine
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Block
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options


class BlockState:
    """Values change by swapping buffers, so a reader that retained one goes on reading the old values.

    `changed`: the version that brought the current bits (asynchronous: see Store.changes). `frozen`: it is on its way to another
    parameter server, so it takes no push and goes on answering pulls. `freeze_at`: the version that freezes it. `holds`: a whole
    gradient waits for `settle`. `since`: the version that it was initialised or loaded at. `squares`: the sum of the squares of the last whole gradient, if that was held or `measured`."""

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
        mean = combine_buffers if self.is_buffer else combine
        self.squares: float | None = None
        self._holds = holds
        self.tree = Accumulator(pool, lanes, place.dtype, place.elements, mean, keeps_root=holds)

    def __repr__(self) -> str:
        return f"<BlockState {self.place.number} version {self.version}: {self.tree!r}>"

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter: no optimizer steps it."""
        return self._optimizer is None

    def is_empty_at(self, version: int | None) -> bool:  # noqa: ARG002
        """Whether it has no values at `version`: only where blocks are of gradients, and the step had no data."""
        return False

    @property
    def narrows(self) -> bool:
        """Whether it may be sent in a narrower dtype (see trireme_shared.protocol.records.layout.Segment.travels_as)."""
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
        """Add a node to the tree of step `step`. `value` (None with count 0), `memory`, `payload`, `lent`: see Accumulator.add."""
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
        """Step it with the gradient that is held, multiplied by `factor` (one rounded operation for each number); None: without
        any gradient."""
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
        """Asynchronous: apply a gradient at once; in place if nobody reads the values. A buffer takes over the value, or adds it
        if it holds integers."""
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
        """Asynchronous: by how many versions it is ahead of that one. Of a version from before it was loaded, which counted otherwise: by those since then."""
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
        """The next values, in a buffer with a reference of its own; the current one if there is no data or, for a buffer, no
        change."""
        if value is None or (self._optimizer is None and torch.equal(bits_of(value), bits_of(self.current.tensor))):
            return self.current.retain()
        values = self._other_buffer()
        if self._optimizer is None:
            values.tensor.copy_(value)
        else:
            self._optimizer.step_into(values.tensor, self.current.tensor, value, options)
            self.updates += 1
        return values

    def _other_buffer(self) -> Buffer:
        """For the next values: that of the version before, which the step makes unavailable, or another one."""
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
    """Copy a tensor of the state that a block's optimizer starts with. Raises BadFrame if it is not one of those that it has."""
    block = blocks.get(number)
    if block is None or not block.add_state(name, payload):
        msg = f"state {name!r} of block {number}, {payload.nbytes} bytes: no such block, or its optimizer has no such state"
        raise BadFrame(msg)
