"""Gradient vectors and the canonical tree (training.md): a binary counter of subtrees, combined in place,
checked, clipped, and cast for their way.

    lane 0 ─► slot 0        lane 1 ─► slot 1, combined into 0        lane 2 ─► slot 1
    lane 3, the node's last ─► slot 2: as backward finishes a block, 2 into 1, 1 into 0, pushed from slot 0

Slots are allocated once: log2 of a node's lanes, plus one. A trainer that owns fewer lanes than before frees
some. Not thread-safe: one thread computes at a time. In synchronous mode every node of the tree is rounded to
the dtype in which gradients are sent (trireme_shared.blocks.buffers.round_to).

Losses and gradients that are NaN or infinite are noticed before they are pushed. A block is summed right
after it was written, while the processor's cache holds it, which costs a third of reading it again later: the
sum of finite values is finite, unless it overflows itself. Only then each value is looked at. The norm of a
whole gradient that this process has is found block by block, with the bits that parameter servers find
(trireme_shared.blocks.gradient_norm).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer_agent.model.compute import BlockSink
from trainer_agent.model.devices import HOST
from trainer_agent.model.flat import Plan, Vector
from trireme_shared.blocks.buffer_mean import Mean, add_changes, bits_of, mean_of
from trireme_shared.blocks.buffers import DTYPES, cast_into, round_to
from trireme_shared.blocks.gradient_norm import clip_factor, norm_of, squares_of
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.job_choices import Narrow, Transported
from trireme_shared.protocol.records.layout import Block

WHAT_TO_DO = (
    "lower the learning rate or look at the records; "
    "on_nonfinite = skip leaves such minibatches out, on_nonfinite = ignore trains with them"
)
# a slot that none of these steps took is freed; one step is not enough, a task's last may be short
WATCHED_STEPS = 8
TOLD_BYTES = (
    256 << 10
)  # finished blocks are told to the event loop when there are so many bytes of them, or no more will come


class NonFiniteError(FloatingPointError):
    """The loss or a gradient of a minibatch is NaN or infinite."""


class LeftOutError(NonFiniteError):
    """The script's GradScaler found such a gradient, and left the step out."""

    def __init__(self) -> None:
        super().__init__(
            "GradScaler found a gradient that is not finite, and left the step of this minibatch out"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished subtree: `lanes` wide, `count` samples, in gradient slot `slot` (None: empty)."""

    lanes: int
    count: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class TreeRules:
    """How a GradientTree treats the gradients of its nodes."""

    #: by block: the dtype that it is rounded to at every node
    rounded: Sequence[Narrow | None] = ()
    #: the vectors are a GPU's, which is not waited for block by block: `close` does all for whole segments,
    # and sends the vector in one copy
    whole: bool = False
    #: gradients of a lane that are not finite are noticed as its blocks finish; then the lane is `broken`,
    # and no more of its node is done
    finite: bool = False
    #: see LiveBuffers
    counts: bool = False
    #: see Vector
    shared: bool = False
    #: the norm of each node's gradient is limited to it, so `close` does all
    limit: float | None = None
    #: a norm that is not finite is no error
    any_norm: bool = False


class GradientTree:
    """The nodes of one step, and a BlockSink for the last lane of each: `open` ... `done(block)` ... `close`.
    `lane(slot)` is the BlockSink for a lane before, then `add`. `send_buffers`: for finished blocks that are
    not sent from the slot they were computed in. `add`, `done` and `close` raise OverflowError if a value
    does not fit the dtype, `close` NonFiniteError if the norm is not finite."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        send_buffers: SendBuffers | None = None,
        rules: TreeRules | None = None,
    ) -> None:
        rules = rules or TreeRules()
        whole, rounded = rules.whole, rules.rounded
        segments = plan.layout.segments
        self._whole, self._limit, self._any_norm = whole, rules.limit, rules.any_norm
        # the pieces that are combined: blocks, or whole segments
        piece_segments = list(range(len(segments))) if whole else [block.segment for block in plan.blocks]
        self._means: list[Mean] = [
            add_changes if rules.counts and s.kind == "buffer" else mean_of(s.kind) for s in segments
        ]
        self._piece_means = [self._means[number] for number in piece_segments]
        #: blocks of the last lane whose parameters all require no gradient: nothing is sent of them
        self.idle: set[int] = set()
        self._buffer_blocks = [block for block in plan.blocks if segments[block.segment].kind != "param"]
        self._counts = rules.counts
        self._unchanged: dict[int, set[int]] = {}  # by slot: blocks of buffers that forward left as they were
        self._unsent: dict[Interval, set[int]] = {}
        self._plan, self._device, self._send_buffers = plan, device, send_buffers
        self._checked = [
            piece
            for piece, number in enumerate(piece_segments)
            if rules.finite and segments[number].kind == "param"
        ]
        self._unlooked: set[int] = set()  # such pieces of this lane that were not looked at
        self.broken = False
        self._shared = rules.shared and send_buffers is None
        self._rounds = any(rounded)
        by_segment = {block.segment: dtype for block, dtype in zip(plan.blocks, rounded, strict=False)}
        self._rounded = [by_segment.get(number) for number in piece_segments]
        self._scratch: dict[str, torch.Tensor] = {}
        self.slots: list[Vector] = []
        self._free: list[int] = []
        self._memory: dict[int, list[memoryview]] = {}
        self._entries: list[Entry] = []
        self._results: dict[Interval, int | None] = {}
        self._samples: dict[Interval, int] = {}
        self._fold: list[Entry] = []
        self._done: list[bool] = []
        self._sink: BlockSink | None = None  # of the node that is open
        self._steps = self._needed = 0  # steps watched so far, and how many slots they took

    def vector(self, slot: int) -> Vector:
        return self.slots[slot]

    def take(self) -> int:
        """A slot for the next backward; it still has its old content."""
        if not self._free:
            self.slots.append(self._vector())
            self._free.append(len(self.slots) - 1)
        slot = self._free.pop()
        self._unchanged[slot] = set()
        self._unlooked, self.broken = set(self._checked), False
        self._needed = max(self._needed, slot + 1)
        if self.slots[slot].lost:
            self.slots[slot] = self._vector()
            self._memory.pop(slot, None)
        if self._send_buffers is not None:
            self._send_buffers.renew(slot)
        return slot

    def _vector(self) -> Vector:
        return Vector(self._plan, self._device, shared=self._shared)

    def forget(self) -> None:
        """All slots may be overwritten. Slots that no recent step needed are freed."""
        self._entries, self._results, self._samples, self._unsent = [], {}, {}, {}
        self._steps += 1
        if self._steps == WATCHED_STEPS:
            kept = self._needed or len(self.slots)
            for slot in range(kept, len(self.slots)):
                self._memory.pop(slot, None)
                if self._send_buffers is not None:
                    self._send_buffers.drop(slot)
            del self.slots[kept:]
            self._steps = self._needed = 0
        self._free = list(reversed(range(len(self.slots))))

    def samples(self, node: Interval) -> int:
        return self._samples[node]

    def contribution(self, node: Interval, block: int) -> memoryview:
        """Bytes of a finished block (none where the node is empty)."""
        slot = self._results[node]
        if slot is None or block in self._unsent[node]:
            return memoryview(b"")
        if self._send_buffers is not None:
            return self._send_buffers.memory(slot)[block]
        if slot not in self._memory:
            self._memory[slot] = self.slots[slot].memory()
        return self._memory[slot][block]

    def add(self, entry: Entry) -> None:
        """A lane that is not the node's last: equal neighbours become one subtree, like carries of a binary
        counter."""
        self._round_all(entry)
        self._entries.append(entry)
        while len(self._entries) > 1 and self._entries[-1].lanes == self._entries[-2].lanes:
            right, left = self._entries.pop(), self._entries.pop()
            if left.slot is not None and right.slot is not None:
                xs, ys = self.slots[left.slot].segments, self.slots[right.slot].segments
                with torch.no_grad():
                    for mean, x, y in zip(self._means, xs, ys, strict=True):
                        mean(x, left.count, y, right.count)
                self._unchanged[left.slot] &= self._unchanged[right.slot]
                self._free.append(right.slot)
            slot = left.slot if left.slot is not None else right.slot
            both = Entry(left.lanes + right.lanes, left.count + right.count, slot)
            self._round_all(both)
            self._entries.append(both)

    def open(self, node: Interval, last: Entry, sink: BlockSink) -> None:
        """The node's last lane starts: choose the slot of the result (that of the leftmost subtree with
        data). `sink` takes the node's blocks."""
        self._fold = [*self._entries, last]
        self._results[node] = next((entry.slot for entry in self._fold if entry.count), None)
        self._samples[node] = sum(entry.count for entry in self._fold)
        self._unsent[node] = set()
        self.broken = False
        self._node, self._result, self._sink = node, self._results[node], sink
        self._done = [False] * len(self._plan.blocks)

    def done(self, block: int) -> None:
        """The last lane's part of the block is final: combine from the right, in place. Then the node's block
        is done."""
        assert self._sink is not None
        self._done[block] = True
        if self._result is None:
            self._sink.done(block)
            return
        if (slot := self._fold[-1].slot) is not None:
            self.look(slot, block)
        if self.broken:
            return
        if block in self.idle or self._is_unchanged(block):
            self._unsent[self._node].add(block)
        else:
            self._combine(block)
            self._put(self._result, block)
        self._sink.done(block)

    def _put(self, result: int, block: int) -> None:
        if self._send_buffers is not None:
            self._send_buffers.put(result, block, self.slots[result].blocks[block])

    def close(self) -> None:
        """Finish what is left (parameters without gradient, buffers); the slots of the other subtrees become
        free."""
        if (slot := self._fold[-1].slot) is not None:
            self.is_finite(slot)
        if self._result is not None and not self.broken:
            if self._whole:
                self._finish_all(self._result)
            elif self._limit is not None:
                self._finish_blocks(self._result, self._limit)
        for block, done in enumerate(self._done):
            if not done:
                self.done(block)
        self._free += [e.slot for e in reversed(self._fold) if e.slot is not None and e.slot != self._result]
        self._entries, self._fold, self._sink = [], [], None

    def _finish_all(self, result: int) -> None:
        """The vector of the node, in whole segments and one copy."""
        assert self._send_buffers is not None
        for piece in range(len(self._means)):
            self._combine(piece)
        if self._limit is not None:
            clip(self._plan, self.slots[result], self._limit, any_norm=self._any_norm)
        self._send_buffers.put_all(result, self.slots[result])
        self._unsent[self._node] = self._unsent_of_all()
        self._all_done()

    def _finish_blocks(self, result: int, limit: float) -> None:
        """All blocks of the node, once it is clipped."""
        self._unsent[self._node] = self._unsent_of_all()
        numbers = [block.number for block in self._plan.blocks]
        for block in numbers:
            if block not in self._unsent[self._node]:
                self._combine(block)
        clip(self._plan, self.slots[result], limit, any_norm=self._any_norm)
        for block in numbers:
            if block not in self._unsent[self._node]:
                self._put(result, block)
        self._all_done()

    def _unsent_of_all(self) -> set[int]:
        return self.idle | {block.number for block in self._buffer_blocks if self._is_unchanged(block.number)}

    def _all_done(self) -> None:
        assert self._sink is not None
        for block in self._plan.blocks:
            self._sink.done(block.number)
        self._done = [True] * len(self._done)

    def _combine(self, piece: int) -> None:
        """The node's values of a block, or of a segment: from the right, in place."""
        *lefts, right = self._fold
        total, count = self._pieces(right.slot)[piece] if right.slot is not None else None, right.count
        with torch.no_grad():
            self.round_node(piece, total)
            for left in reversed(lefts):
                mine = self._pieces(left.slot)[piece] if left.slot is not None else None
                total, count = self._piece_means[piece](mine, left.count, total, count)
                self.round_node(piece, total)

    def _pieces(self, slot: int) -> list[torch.Tensor]:
        return self.slots[slot].segments if self._whole else self.slots[slot].blocks

    def lane(self, slot: int) -> BlockSink:
        """For the blocks of a lane that is not the node's last, in `slot`."""
        return _Lane(self, slot)

    def look(self, slot: int, block: int) -> None:
        """A block of the lane in `slot` is written (not for a GPU)."""
        if block in self._unlooked and not self._whole:
            self._unlooked.remove(block)
            self.broken = self.broken or not is_finite(self.slots[slot].blocks[block])

    def is_finite(self, slot: int) -> bool:
        """Whether all gradients of the lane in `slot` are."""
        pieces = self._pieces(slot)
        self.broken = self.broken or not all_finite([pieces[number] for number in self._unlooked])
        self._unlooked.clear()
        return not self.broken

    def note_unchanged(self, slot: int, loaded: Vector) -> None:
        """A lane's forward is over and its buffers are in the slot; they were loaded from `loaded`."""
        if not self._buffer_blocks:
            return
        after, before = self.slots[slot].blocks, loaded.blocks
        changed = torch.stack(
            [
                after[block.number].any()
                if self._counts and block.dtype == "int64"
                else (bits_of(after[block.number]) != bits_of(before[block.number])).any()
                for block in self._buffer_blocks
            ]
        )  # a GPU is waited for once
        numbers = [block.number for block in self._buffer_blocks]
        self._unchanged[slot] = {
            number for number, flag in zip(numbers, changed.tolist(), strict=True) if not flag
        }

    def _is_unchanged(self, block: int) -> bool:
        """In every lane of the open node that has data."""
        slots = [entry.slot for entry in self._fold if entry.slot is not None]
        return all(block in self._unchanged[slot] for slot in slots)

    def free(self, slot: int) -> None:
        """A slot that is in no entry."""
        self._free.append(slot)

    def _round_all(self, entry: Entry) -> None:
        if self._rounds and entry.slot is not None:
            for piece, values in enumerate(self._pieces(entry.slot)):
                self.round_node(piece, values)

    def round_node(self, piece: int, values: torch.Tensor | None) -> None:
        dtype = self._rounded[piece]
        if dtype is None or values is None:
            return
        if dtype not in self._scratch:
            largest = max(
                part.elements for part in (self._plan.layout.segments if self._whole else self._plan.blocks)
            )
            self._scratch[dtype] = torch.empty(largest, dtype=DTYPES[dtype], device=self._device)
        try:
            round_to(values, self._scratch[dtype][: values.numel()])
        except OverflowError as error:
            raise overflow(f"{'segment' if self._whole else 'block'} {piece}", error) from None


class _Lane:
    """A BlockSink that only looks at the blocks: they are combined when the lane is over."""

    def __init__(self, tree: GradientTree, slot: int) -> None:
        self._tree, self._slot = tree, slot

    def done(self, block: int) -> None:
        self._tree.look(self._slot, block)


class ToEventLoop:
    """A BlockSink for the thread that computes: `sink` takes the blocks in the event loop in which this was
    made. Small blocks go together: waking the event loop and a parameter server for each costs too much."""

    def __init__(self, blocks: Sequence[Block], sink: BlockSink) -> None:
        """`blocks`: each of them will be done once."""
        self._loop = asyncio.get_running_loop()
        self._blocks, self._sink = blocks, sink
        self._waiting: list[int] = []
        self._bytes, self._left = 0, len(blocks)

    def done(self, block: int) -> None:
        self._waiting.append(block)
        self._bytes += self._blocks[block].bytes
        self._left -= 1
        if self._bytes >= TOLD_BYTES or not self._left:
            self._loop.call_soon_threadsafe(self._all_done, tuple(self._waiting))
            self._waiting.clear()
            self._bytes = 0

    def _all_done(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._sink.done(block)


class SendBuffers:
    """Host memory for finished gradients that are not sent from the memory they were computed in: from a GPU,
    or cast.

        cast: block + residual ─► narrower dtype ─► sent
        the new residual = block + residual - what is sent
        GPU: the whole vector, cast there ─► one copy to page-locked host memory ─► all blocks sent

    There is a host vector per gradient slot, in the dtypes that are sent; allocated once. A copy for each
    block of a GPU's vector would cost a wait for each. Not thread-safe. `shared`: see Vector.

    Error feedback (Seide et al. 2014, Karimireddy et al. 2019): the residual of a block's cast is added to
    its next gradient, so nothing is lost for ever. The residual is kept by this trainer only: if it dies, at
    most one rounding error per element is lost."""

    def __init__(
        self, plan: Plan, device: torch.device, dtype: Transported, *, feedback: bool, shared: bool = False
    ) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        self._shared = shared and device.type == "cpu"
        self._narrow = plan.layout.payloads(dtype)
        self.hosts: dict[int, tuple[Vector, list[memoryview]]] = {}
        feeds = [feedback and segment.travels_as(dtype) is not None for segment in plan.layout.segments]
        self._residuals = [
            torch.zeros(segment.elements, device=device) if fed else None
            for segment, fed in zip(plan.layout.segments, feeds, strict=True)
        ]
        self.residuals = {
            block.number: residual[block.first : block.first + block.elements]
            for block in plan.blocks
            if (residual := self._residuals[block.segment]) is not None
        }
        self._cast: Vector | None = None  # on a GPU: what is sent

    def __repr__(self) -> str:
        return (
            f"<SendBuffers from {self._device} as {self._dtype}, {len(self.residuals)} blocks with feedback>"
        )

    def memory(self, slot: int) -> list[memoryview]:
        return self._host(slot)[1]

    def renew(self, slot: int) -> None:
        """Before the slot's vector is written: replace one that a parameter server may still read."""
        if slot in self.hosts and self.hosts[slot][0].lost:
            del self.hosts[slot]

    def drop(self, slot: int) -> None:
        """The slot was freed."""
        self.hosts.pop(slot, None)

    def put(self, slot: int, block: int, values: torch.Tensor) -> None:
        """Take a finished block in host memory; `values` may change. Raises OverflowError."""
        out = self._host(slot)[0].blocks[block]
        self._write(out, values, self._narrow[block], self.residuals.get(block), f"block {block}")

    def put_all(self, slot: int, vector: Vector) -> None:
        """Take a whole vector of a GPU, and wait for it; its values may change. Raises OverflowError."""
        sent = vector
        if any(self._narrow):
            sent = self._cast = self._cast or Vector(self._plan, self._device, dtype=self._dtype)
            for number, segment in enumerate(self._plan.layout.segments):
                out, values, residual = (
                    sent.segments[number],
                    vector.segments[number],
                    self._residuals[number],
                )
                self._write(out, values, segment.travels_as(self._dtype), residual, f"segment {number}")
        self._host(slot)[0].flat.copy_(sent.flat)

    def clear_residuals(self) -> None:
        """What was left out belongs to parameters that are no longer in use."""
        for residual in self.residuals.values():
            residual.zero_()

    @staticmethod
    def _write(
        out: torch.Tensor,
        values: torch.Tensor,
        dtype: Narrow | None,
        residual: torch.Tensor | None,
        where: str,
    ) -> None:
        with torch.no_grad():
            if dtype is None:
                out.copy_(values)
                return
            if residual is not None:
                values.add_(residual)
            try:
                cast_into(out, values)
            except OverflowError as error:
                raise overflow(where, error) from None
            if residual is not None:
                torch.sub(values, residual.copy_(out), out=residual)

    def _host(self, slot: int) -> tuple[Vector, list[memoryview]]:
        if slot not in self.hosts:
            host = Vector(
                self._plan, HOST, pinned=self._device.type == "cuda", dtype=self._dtype, shared=self._shared
            )
            self.hosts[slot] = host, host.memory()
        return self.hosts[slot]


def overflow(where: str, error: OverflowError) -> OverflowError:
    return OverflowError(
        f"a gradient in {where}: {error}; use gradient_dtype bfloat16, or scale the loss down"
    )


def check_loss(loss: float) -> None:
    """Raises NonFiniteError."""
    if not math.isfinite(loss):
        msg = f"the loss is {loss}; {WHAT_TO_DO}"
        raise NonFiniteError(msg)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return math.isfinite(values.sum(dtype=torch.float32).item()) or bool(torch.isfinite(values).all())


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """As `is_finite`. On a GPU they are waited for once."""
    sums = [values.sum(dtype=torch.float32) for values in tensors]
    return not sums or math.isfinite(torch.stack(sums).sum().item()) or all(map(is_finite, tensors))


def check_gradients(gradients: Mapping[str, torch.Tensor]) -> None:
    """By names of parameters. Raises NonFiniteError, which names the first one that is not finite."""
    for name, gradient in gradients.items():
        if not is_finite(gradient):
            bad = gradient[~torch.isfinite(gradient)]
            msg = (
                f"the gradient of {name} has {bad.numel()} of {gradient.numel()} values that are not finite "
                f"(the first is {bad[0].item()}); {WHAT_TO_DO}"
            )
            raise NonFiniteError(msg)


def norm_of_vector(plan: Plan, gradients: Vector) -> float:
    """Of the blocks of parameters."""
    segments = plan.layout.segments
    blocks = (gradients.blocks[b.number] for b in plan.blocks if segments[b.segment].kind == "param")
    return norm_of(squares_of(block.cpu()) for block in blocks)


def clip(plan: Plan, gradients: Vector, limit: float, *, any_norm: bool) -> None:
    """In place. Raises NonFiniteError, unless `any_norm`: then a NaN makes all NaN, as in
    nn.utils.clip_grad_norm_."""
    norm = norm_of_vector(plan, gradients)
    if not any_norm and not math.isfinite(norm):
        msg = (
            f"the norm of the mean gradient is {norm}, although that of each minibatch is finite; "
            f"{WHAT_TO_DO}"
        )
        raise NonFiniteError(msg)
    if (factor := clip_factor(norm, limit)) != 1.0:
        for segment, values in zip(plan.layout.segments, gradients.segments, strict=True):
            if segment.kind == "param":
                values.mul_(factor)


class GradientClipper:
    """Clips gradients of `plan`'s parameters that lie anywhere, as training without any service has them."""

    def __init__(self, plan: Plan, limit: float, device: torch.device) -> None:
        self._plan, self._limit = plan, limit
        self._vector = Vector(plan, device)
        self._views = self._vector.views(plan.parameters)

    def clip(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """In place. `gradients`: in the order of the plan's parameters. Returns their norm, before."""
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        norm = norm_of_vector(self._plan, self._vector)
        if (factor := clip_factor(norm, self._limit)) != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return norm
