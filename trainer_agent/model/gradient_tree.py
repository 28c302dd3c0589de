"""Gradient vectors and the canonical tree (training.md): a binary counter of subtrees, combined in place.

    lane 0 ─► slot 0        lane 1 ─► slot 1, combined into 0        lane 2 ─► slot 1
    lane 3, the node's last ─► slot 2: as backward finishes a block, 2 into 1, 1 into 0, announced, pushed from slot 0

Slots are allocated once: log2 of a node's lanes, plus one. A trainer that owns fewer lanes than before frees some. Not
thread-safe: one thread computes at a time. In synchronous mode every node of the tree is rounded to the dtype in which
gradients are sent (shared.blocks.narrow.round_to).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.blocks.buffer_mean import add_changes, bits_of, combine_buffers
from shared.blocks.narrow import DTYPES, round_to
from shared.lanes import Interval, combine
from shared.records.job_spec import Narrow
from trainer_agent.model.finite import is_finite
from trainer_agent.model.flat import Plan, Vector
from trainer_agent.model.send_buffers import SendBuffers, overflow

WATCHED_STEPS = 8  # a slot that none of these steps took is freed; one step is not enough, a task's last may be short


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished subtree: `lanes` wide, `count` samples, in gradient slot `slot` (None: empty)."""

    lanes: int
    count: int
    slot: int | None


class GradientTree:
    """The nodes of one step. `open` ... `finish(block)` ... `close` around a node's last lane, `add` for the lanes before.

    `send_buffers`: for finished blocks that are not sent from the slot they were computed in. `rounded`: the dtype that each
    block is rounded to at every node. `finite`: a last lane whose gradients are not finite is noticed as its blocks finish;
    then the node is `broken`, and no more of it is announced. `counts`: see LiveBuffers. `shared`: see Vector. `add`, `finish` and `close` raise OverflowError if a value does
    not fit the dtype.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        send_buffers: SendBuffers | None = None,
        rounded: Sequence[Narrow | None] = (),
        *,
        finite: bool = False,
        counts: bool = False,
        shared: bool = False,
    ) -> None:
        segments = plan.layout.segments
        self._means: list[Callable[..., tuple[Any, int]]] = [
            combine if s.kind == "param" else add_changes if counts else combine_buffers for s in segments
        ]
        self._buffer_blocks = [block for block in plan.blocks if segments[block.segment].kind == "buffer"]
        self._counts = counts
        self._unchanged: dict[int, set[int]] = {}  # by slot: blocks of buffers that forward left as they were
        self._unsent: dict[Interval, set[int]] = {}
        self._plan, self._device, self._send_buffers = plan, device, send_buffers
        self._checked = [finite and segments[block.segment].kind == "param" for block in plan.blocks]
        self._sums: list[torch.Tensor] = []
        self.broken = False
        self._shared = shared and send_buffers is None
        self._rounded = rounded if any(rounded) else [None] * len(plan.blocks)
        self._rounds = any(rounded)
        self._scratch: dict[str, torch.Tensor] = {}
        self.slots: list[Vector] = []
        self._free: list[int] = []
        self._memory: dict[int, list[memoryview]] = {}
        self._entries: list[Entry] = []
        self._results: dict[Interval, int | None] = {}
        self._samples: dict[Interval, int] = {}
        self._fold: list[Entry] = []
        self._done: list[bool] = []
        self._announce: Callable[[int], object] = bool
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
        if self._send_buffers is not None:
            self._send_buffers.drain(bool)  # copies of a minibatch that failed
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
        """A lane that is not the node's last: equal neighbours become one subtree, like carries of a binary counter."""
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

    def open(self, node: Interval, last: Entry, announce: Callable[[int], object]) -> None:
        """The node's last lane starts: choose the slot of the result (that of the leftmost subtree with data)."""
        self._fold = [*self._entries, last]
        self._results[node] = next((entry.slot for entry in self._fold if entry.count), None)
        self._samples[node] = sum(entry.count for entry in self._fold)
        self._unsent[node] = set()
        self._sums, self.broken = [], False
        self._node, self._result, self._announce = node, self._results[node], announce
        self._done = [False] * len(self._plan.blocks)

    def finish(self, block: int) -> None:
        """The last lane's part of the block is final: combine from the right, in place, and announce."""
        self._done[block] = True
        if self._result is None:
            self._announce(block)
            return
        *lefts, right = self._fold
        mean = self._means[self._plan.blocks[block].segment]
        total, count = self.slots[right.slot].blocks[block] if right.slot is not None else None, right.count
        with torch.no_grad():
            if total is not None and self._checked[block] and not self._seems_finite(total):
                self.broken = True
            if self.broken:
                return
            if self._is_unchanged(block):
                self._unsent[self._node].add(block)
                self._announce(block)
                return
            self.round_node(block, total)
            for left in reversed(lefts):
                mine = self.slots[left.slot].blocks[block] if left.slot is not None else None
                total, count = mean(mine, left.count, total, count)
                self.round_node(block, total)
        if self._send_buffers is None:
            self._announce(block)
        else:
            self._send_buffers.put(self._result, block, self.slots[self._result].blocks[block], self._announce)

    def close(self) -> None:
        """Finish what is left (parameters without gradient, buffers); the slots of the other subtrees become free."""
        for block, done in enumerate(self._done):
            if not done:
                self.finish(block)
        if self._sums:
            self.broken = not is_finite(torch.stack(self._sums)) and self._has_values_that_are_not_finite()
        if self._send_buffers is not None:
            self._send_buffers.drain(bool if self.broken else self._announce)
        self._free += [e.slot for e in reversed(self._fold) if e.slot is not None and e.slot != self._result]
        self._entries, self._fold, self._announce = [], [], bool

    def _seems_finite(self, values: torch.Tensor) -> bool:
        """On a GPU `close` looks at the sum: here it would have to be waited for."""
        if self._device.type == "cpu":
            return is_finite(values)
        self._sums.append(values.sum(dtype=torch.float32))
        return True

    def _has_values_that_are_not_finite(self) -> bool:
        slot = self._fold[-1].slot
        return slot is not None and not self.is_finite(slot)

    def is_finite(self, slot: int) -> bool:
        """Whether all gradients in a slot are."""
        segments = zip(self._plan.layout.segments, self.slots[slot].segments, strict=True)
        return all(is_finite(values) for segment, values in segments if segment.kind == "param")

    def note_unchanged(self, slot: int, loaded: Vector) -> None:
        """A lane's forward is over and its buffers are in the slot; they were loaded from `loaded`."""
        after, before = self.slots[slot].blocks, loaded.blocks
        self._unchanged[slot] = {
            block.number
            for block in self._buffer_blocks
            if (
                not after[block.number].any()
                if self._counts and block.dtype == "int64"
                else torch.equal(bits_of(after[block.number]), bits_of(before[block.number]))
            )
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
            for block, values in enumerate(self.slots[entry.slot].blocks):
                self.round_node(block, values)

    def round_node(self, block: int, values: torch.Tensor | None) -> None:
        dtype = self._rounded[block]
        if dtype is None or values is None:
            return
        if dtype not in self._scratch:
            largest = max(block.elements for block in self._plan.blocks)
            self._scratch[dtype] = torch.empty(largest, dtype=DTYPES[dtype], device=self._device)
        try:
            round_to(values, self._scratch[dtype][: values.numel()])
        except OverflowError as error:
            raise overflow(block, error) from None
