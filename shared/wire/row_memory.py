"""Memory for rows of embedding tables that the process at the other end of a UNIX stream reads in place.

    server:   answers of lookups, copied here and lent until they are taken      trainer:  gradients of rows, until nobody refers to them any more

Sizes are rounded up to powers of two, so that few kinds of memory serve all. Both have a limit, beyond which payloads go through the stream.
"""

from __future__ import annotations

import sys

import torch

from shared.blocks.buffers import Buffer, BufferPool, Home
from shared.wire.region_allocator import RegionAllocator, new_region
from shared.wire.shared_memory import Region

LEAST_BYTES = 256 << 10  # smaller payloads go through the stream: that is as fast
MOST_BYTES = 256 << 20  # of a process


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


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
        kind = "float32", _rounded(payload.nbytes) // 4
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


class GradientMemory:
    """Of one trainer: regions of one payload each."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._possible = True

    def __repr__(self) -> str:
        return f"<GradientMemory {len(self._regions)} regions, {self.bytes >> 10} KiB>"

    @property
    def bytes(self) -> int:
        return sum(map(len, self._regions))

    def take(self, size: int) -> memoryview:
        """Memory of `size` bytes; it is its own as long as something refers to it. Private memory where there is no other."""
        region = self._region(_rounded(size)) if size >= LEAST_BYTES else None
        return memoryview(bytearray(size)) if region is None else memoryview(region)[:size]

    def _region(self, size: int) -> Region | None:
        self._regions = [region for region in self._regions if not region.lost]  # somebody may read them still
        for place in range(len(self._regions)):
            region = self._regions[place]
            # referred to by the list, the name here and the argument: by no view, and by no push whose end is not known
            if len(region) == size and sys.getrefcount(region) == 3:
                self._regions.append(self._regions.pop(place))
                return region
        self._make_room(size)
        if not self._possible or self.bytes + size > MOST_BYTES:
            return None
        made = new_region(size)
        self._possible = made is not None
        self._regions += [] if made is None else [made]
        return made

    def _make_room(self, size: int) -> None:
        """Forget regions of other sizes that nobody refers to, those that were not used for longest first."""
        place = 0
        while self.bytes + size > MOST_BYTES and place < len(self._regions):
            if sys.getrefcount(self._regions[place]) == 2:
                del self._regions[place]
            else:
                place += 1
