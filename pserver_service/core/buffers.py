"""Memory of blocks: allocated once, counted by reference, reused through free lists.

    take() -> 1 reference --retain/release--> 0 references -> free list -> take()

Whoever reads a buffer across an `await` (a pull on its way out) retains it, so nothing overwrites what is being sent.
"""

from __future__ import annotations

from collections import defaultdict

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}


class Buffer:
    """`tensor`: 1-d, 64-byte aligned; `view`: its bytes, writable."""

    __slots__ = ("_pool", "kind", "references", "tensor", "view")

    def __init__(self, pool: BufferPool, kind: tuple[str, int], tensor: torch.Tensor) -> None:
        self.kind = kind
        self.tensor = tensor
        self.view = bytes_of(tensor)
        self.references = 1
        self._pool = pool

    def __repr__(self) -> str:
        return f"<Buffer {self.tensor.numel()} x {self.tensor.dtype}, {self.references} references>"

    def retain(self) -> Buffer:
        assert self.references > 0
        self.references += 1
        return self

    def release(self) -> None:
        assert self.references > 0
        self.references -= 1
        if self.references == 0:
            self._pool.put_back(self)


class BufferPool:
    """Free lists by (dtype, elements). Never shrinks: its size is the most that was in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[Buffer]] = defaultdict(list)
        self.allocated_bytes = 0
        self.free_bytes = 0

    def __repr__(self) -> str:
        return f"<BufferPool {self.allocated_bytes >> 10} KiB, {self.free_bytes >> 10} KiB free>"

    def take(self, dtype: str, elements: int) -> Buffer:
        """A buffer with one reference; its contents are arbitrary."""
        free = self._free[dtype, elements]
        if free:
            buffer = free.pop()
            buffer.references = 1
            self.free_bytes -= buffer.view.nbytes
            return buffer
        buffer = Buffer(self, (dtype, elements), torch.empty(elements, dtype=DTYPES[dtype]))
        self.allocated_bytes += buffer.view.nbytes
        return buffer

    def put_back(self, buffer: Buffer) -> None:
        """Called by the last `release`."""
        self._free[buffer.kind].append(buffer)
        self.free_bytes += buffer.view.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not a copy."""
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


def tensor_over(payload: memoryview, dtype: str) -> torch.Tensor:
    """A 1-d tensor over writable memory, not a copy."""
    return torch.frombuffer(payload, dtype=DTYPES[dtype])
