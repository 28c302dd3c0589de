"""Gradient vectors and the canonical tree (training.md): a binary counter of subtrees, combined in place.

    lane 0 ─► slot 0        lane 1 ─► slot 1, combined into 0        lane 2 ─► slot 1
    lane 3, the node's last ─► slot 2: as backward finishes a block, 2 into 1, 1 into 0, announced, pushed from slot 0

Slots are allocated once: log2 of the lanes of a node, plus one. Not thread-safe: one thread computes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.lanes import Interval, combine
from trainer_agent.flat import Plan, Vector

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished subtree: `lanes` wide, `count` samples, in gradient slot `slot` (None: empty)."""

    lanes: int
    count: int
    slot: int | None


class GradientTree:
    """The nodes of one step. `open` ... `finish(block)` ... `close` around a node's last lane, `add` for the lanes before."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._slots: list[Vector] = []
        self._free: list[int] = []
        self._memory: dict[int, list[memoryview]] = {}
        self._entries: list[Entry] = []
        self._results: dict[Interval, int | None] = {}
        self._outbound = _Outbound(plan, device) if device.type != "cpu" else None
        self._fold: list[Entry] = []
        self._done: list[bool] = []
        self._announce: Callable[[int], object] = bool

    def vector(self, slot: int) -> Vector:
        return self._slots[slot]

    def take(self) -> int:
        """A slot for the next backward; its old content is still there."""
        if not self._free:
            self._slots.append(Vector(self._plan, self._device))
            self._free.append(len(self._slots) - 1)
        return self._free.pop()

    def forget(self) -> None:
        """All slots may be overwritten."""
        self._entries, self._results = [], {}
        self._free = list(reversed(range(len(self._slots))))

    def contribution(self, node: Interval, block: int) -> memoryview:
        """Bytes of a finished block (none where the node is empty)."""
        slot = self._results[node]
        if slot is None:
            return memoryview(b"")
        if self._outbound is not None:
            return self._outbound.memory(slot)[block]
        if slot not in self._memory:
            self._memory[slot] = self._slots[slot].memory()
        return self._memory[slot][block]

    def add(self, entry: Entry) -> None:
        """A lane that is not the node's last: equal neighbours become one subtree, like carries of a binary counter."""
        self._entries.append(entry)
        while len(self._entries) > 1 and self._entries[-1].lanes == self._entries[-2].lanes:
            right, left = self._entries.pop(), self._entries.pop()
            if left.slot is not None and right.slot is not None:
                with torch.no_grad():
                    for x, y in zip(self._slots[left.slot].segments, self._slots[right.slot].segments, strict=True):
                        combine(x, left.count, y, right.count)
                self._free.append(right.slot)
            slot = left.slot if left.slot is not None else right.slot
            self._entries.append(Entry(left.lanes + right.lanes, left.count + right.count, slot))

    def open(self, node: Interval, last: Entry, announce: Callable[[int], object]) -> None:
        """The node's last lane starts: decide where the result will lie (the leftmost subtree that has data)."""
        self._fold = [*self._entries, last]
        self._results[node] = next((entry.slot for entry in self._fold if entry.count), None)
        self._result, self._announce = self._results[node], announce
        self._done = [False] * len(self._plan.blocks)

    def finish(self, block: int) -> None:
        """The last lane's part of the block is final: combine from the right, in place, and announce."""
        self._done[block] = True
        if self._result is None:
            self._announce(block)
            return
        *lefts, right = self._fold
        total, count = self._slots[right.slot].blocks[block] if right.slot is not None else None, right.count
        with torch.no_grad():
            for left in reversed(lefts):
                mine = self._slots[left.slot].blocks[block] if left.slot is not None else None
                total, count = combine(mine, left.count, total, count)
        if self._outbound is None:
            self._announce(block)
        else:
            self._outbound.copy(self._result, block, self._slots[self._result])

    def close(self) -> None:
        """Finish what is left (parameters without gradient, buffers); the slots of the other subtrees become free."""
        for block, done in enumerate(self._done):
            if not done:
                self.finish(block)
        if self._outbound is not None:
            self._outbound.drain(self._announce)
        self._free += [e.slot for e in reversed(self._fold) if e.slot is not None and e.slot != self._result]
        self._entries, self._fold, self._announce = [], [], bool


class _Outbound:
    """GPU only: finished blocks go to page-locked host memory on a stream of their own, beside backward."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hosts: dict[int, tuple[Vector, list[memoryview]]] = {}
        self._copies: list[tuple[int, torch.cuda.Event]] = []

    def memory(self, slot: int) -> list[memoryview]:
        return self._host(slot)[1]

    def copy(self, slot: int, block: int, vector: Vector) -> None:
        """Queue the copy behind what the computing stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._host(slot)[0].blocks[block].copy_(vector.blocks[block], non_blocking=True)
            copied.record()
        self._copies.append((block, copied))

    def drain(self, announce: Callable[[int], object]) -> None:
        """Announce each block when its copy is there."""
        for block, copied in self._copies:
            copied.synchronize()
            announce(block)
        self._copies.clear()

    def _host(self, slot: int) -> tuple[Vector, list[memoryview]]:
        if slot not in self._hosts:
            host = Vector(self._plan, HOST, pinned=True)
            self._hosts[slot] = host, host.memory()
        return self._hosts[slot]
