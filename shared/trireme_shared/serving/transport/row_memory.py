"""Memory for rows of embedding tables that the process at the other end of a UNIX stream reads in place.

    server:   answers of lookups, copied here and lent until they are taken      trainer:  gradients of rows, until nobody refers to them any more

Sizes are rounded up to powers of two, so that few kinds of memory serve all. Both have a limit, beyond which payloads go through the stream.
"""

from __future__ import annotations

import torch

from trireme_shared.blocks.buffers import LEAST_BYTES, Buffer, BufferPool, Home, ReusedMemory, rounded
from trireme_shared.serving.transport.region_allocator import RegionAllocator, new_region
from trireme_shared.serving.transport.shared_memory import Region

MOST_BYTES = 256 << 20  # of a process


class AnswerMemory:
    """Of one server."""

    def __init__(self) -> None:
        self._regions = RegionAllocator()
        self._pool = BufferPool(self._allocated)

    def __repr__(self) -> str:
        return f"<AnswerMemory {self._pool!r}>"

    @property
    def bytes(self) -> int:
        return self._pool.allocated_bytes

    @property
    def lent_bytes(self) -> int:
        return self._pool.allocated_bytes - self._pool.free_bytes

    def copied(self, payload: memoryview) -> Buffer | None:
        """A buffer that begins with a copy of the payload, for the caller to release. None: it has to be sent."""
        if payload.nbytes < LEAST_BYTES:
            return None
        kind = "float32", rounded(payload.nbytes) // 4
        if not self._pool.has_free(*kind) and self._pool.allocated_bytes + 4 * kind[1] > MOST_BYTES:
            return None
        try:
            buffer = self._pool.take(*kind)
        except OSError:  # there is none that others may read: a copy would be sent like the payload
            return None
        buffer.view[: payload.nbytes] = payload
        return buffer

    def _allocated(self, size: int) -> tuple[torch.Tensor, Home]:
        """Raises OSError."""
        memory, home = self._regions(size)
        if home is None:
            raise OSError("there is no sealed memfd")
        return memory, home


class GradientMemory(ReusedMemory[Region]):
    """Of one trainer: regions that its parameter servers read. Private memory where there is no other."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES)
        self._possible = True

    def _free(self, size: int) -> Region | None:
        self._all = [region for region in self._all if not region.lost]  # somebody may read them still
        return super()._free(size)

    def _made(self, size: int) -> Region | None:
        made = new_region(size) if self._possible else None
        self._possible = made is not None
        return made
