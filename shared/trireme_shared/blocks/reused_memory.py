"""Memory of payloads that is used again as soon as nobody refers to it.

New memory costs page faults where it is written first: those of a large page take up to 20 ms each, in the event loop. Sizes are rounded up to powers of
two, so that few kinds of memory serve all.
"""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Generic, TypeVar

LEAST_BYTES = 256 << 10  # smaller payloads have memory of their own, and go through streams: that is as fast
MOST_BYTES = 256 << 20  # of one ReceivedMemory
M = TypeVar("M", bound=Sized)


def rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


class ReusedMemory(Generic[M]):
    """Memories of sizes that are powers of two, each for one payload, until nobody refers to it any more."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._all: list[M] = []  # those that were used longest ago come first

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._all)} payloads, {self.bytes >> 10} KiB>"

    @property
    def bytes(self) -> int:
        return sum(map(len, self._all))

    def _made(self, size: int) -> M | None:
        raise NotImplementedError

    def take(self, size: int) -> memoryview:
        """Memory of `size` bytes; it is its own as long as something refers to it."""
        found = self._free(rounded(size)) if size >= LEAST_BYTES else None
        return memoryview(bytearray(size)) if found is None else memoryview(found)[:size]  # type: ignore[arg-type]

    def _free(self, size: int) -> M | None:
        for place in range(len(self._all)):
            found = self._all[place]
            # referred to by the list, the name here and the argument: by no view, and by no push whose end is not known
            if len(found) == size and sys.getrefcount(found) == 3:
                self._all.append(self._all.pop(place))
                return found
        self._make_room(size)
        made = self._made(size) if self.bytes + size <= self._most_bytes else None
        self._all += [] if made is None else [made]
        return made

    def _make_room(self, size: int) -> None:
        """Forget memories of other sizes that nobody refers to, those that were not used for longest first."""
        place = 0
        while self.bytes + size > self._most_bytes and place < len(self._all):
            if sys.getrefcount(self._all[place]) == 2:
                del self._all[place]
            else:
                place += 1


class ReceivedMemory(ReusedMemory[bytearray]):
    """Of one server: rows that are pushed to it."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES)

    def _made(self, size: int) -> bytearray:
        return bytearray(size)

    def copied(self, payload: memoryview) -> memoryview:
        copy = self.take(payload.nbytes)
        copy[:] = payload.cast("B")
        return copy
