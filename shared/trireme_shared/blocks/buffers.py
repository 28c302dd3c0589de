"""Memory of blocks: allocated once, counted by reference, reused through free lists.

    take() -> 1 reference --retain/release--> 0 references -> free list -> take()
                  | narrowed(dtype): a second buffer, cast once for all readers, until the values change

A reader that uses a buffer across an `await` (a pull that is being sent) retains it, so nothing overwrites it
meanwhile.

Payloads of rows have ReusedMemory: it serves again as soon as nobody refers to it. New memory costs page
faults where it is written first: those of a large page take up to 20 ms each, in the event loop.

float32 values in a narrower dtype are rounded to nearest, ties to even; what does not fit float16 is refused.
bfloat16 keeps 8 bits of a value and the whole range of float32. float16 keeps 11 bits from 6e-5 to 65504,
fewer below, and none below 3e-8. Nothing is scaled here: scale the loss if gradients are outside that range.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sized
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
_FLOAT16_END = 65520.0  # the first value that is not rounded down to the largest, 65504
LEAST_BYTES = 256 << 10  # smaller payloads have memory of their own, and go through streams: that is as fast
MOST_BYTES = 256 << 20  # of one ReceivedMemory
M = TypeVar("M", bound=Sized)
Home = tuple[Any, int]
"""The memory that a buffer was cut from, and its offset there: other processes need both to read it in
place."""
Allocate = Callable[[int], tuple[torch.Tensor, Home | None]]
"""Returns so many bytes, 64-byte aligned, as uint8. They are never given back."""


class Owner(Protocol):
    """Of buffers: gets them back with their last reference."""

    def put_back(self, buffer: Buffer) -> None: ...


class Buffer:
    """`tensor`: 1-d, 64-byte aligned; `view`: its bytes, writable; `home` None: other processes cannot read
    it. `cast`: the values in a narrower dtype, if a reader asked for them."""

    __slots__ = ("_owner", "cast", "home", "kind", "references", "tensor", "view")

    def __init__(
        self,
        owner: Owner,
        kind: tuple[str, int],
        tensor: torch.Tensor,
        home: Home | None = None,
        view: memoryview | None = None,
    ) -> None:
        self.kind = kind
        self.home = home
        self.tensor = tensor
        self.view = bytes_of(tensor) if view is None else view
        self.references = 1
        self._owner = owner
        self.cast: Buffer | None = None

    def __repr__(self) -> str:
        return f"<Buffer {self.tensor.numel()} x {self.tensor.dtype}, {self.references} references>"

    def retain(self) -> Buffer:
        assert self.references > 0
        self.references += 1
        return self

    def replaced(self) -> Buffer:
        """Exchange a reference to this buffer for another buffer of the same kind."""
        assert isinstance(self._owner, BufferPool)
        another = self._owner.take(*self.kind)
        self.release()
        return another

    def release(self) -> None:
        assert self.references > 0
        self.references -= 1
        if self.references == 0:
            self.forget_narrowed()
            self._owner.put_back(self)

    @property
    def dtype(self) -> str:
        return self.kind[0]

    def narrowed(self, dtype: str) -> Buffer:
        """The same values cast to `dtype`, for the caller to release. Raises OverflowError if they do not
        fit."""
        if self.cast is None or self.cast.dtype != dtype:
            self.forget_narrowed()
            assert isinstance(self._owner, BufferPool)
            made = self._owner.take(dtype, self.kind[1])
            try:
                cast_into(made.tensor, self.tensor)
            except OverflowError:
                made.release()
                raise
            self.cast = made
        return self.cast.retain()

    def forget_narrowed(self) -> None:
        """The values are about to change. Readers keep the narrowed buffer that they have."""
        if self.cast is not None:
            self.cast.release()
            self.cast = None


class BufferPool:
    """Free lists by (dtype, elements). It never shrinks, until `let_go`: its size is the largest that was in
    use at once."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or _private
        self._free: dict[tuple[str, int], list[Buffer]] = defaultdict(list)
        self._keeps = True
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
        memory, home = self._allocate(elements * DTYPES[dtype].itemsize)
        buffer = Buffer(self, (dtype, elements), memory.view(DTYPES[dtype]), home)
        self.allocated_bytes += buffer.view.nbytes
        return buffer

    def has_free(self, dtype: str, elements: int) -> bool:
        """Whether `take` needs no new memory."""
        return bool(self._free[dtype, elements])

    def let_go(self) -> None:
        """Its user is over: keep no free buffer from now on. Pool and free buffers refer to each other, so
        without this their memory, and the descriptors of shared memory, stayed until the interpreter's
        collector looks."""
        self._keeps = False
        self.allocated_bytes -= self.free_bytes
        self.free_bytes = 0
        self._free.clear()

    def put_back(self, buffer: Buffer) -> None:
        """Called by the last `release`."""
        if not self._keeps:
            self.allocated_bytes -= buffer.view.nbytes
            return
        self._free[buffer.kind].append(buffer)
        self.free_bytes += buffer.view.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not a copy."""
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


def tensor_over(payload: memoryview, dtype: str) -> torch.Tensor:
    """A 1-d tensor over memory, not a copy. Over read-only memory it must not be written to, which torch
    cannot know."""
    if payload.readonly:
        _silence()
    return torch.frombuffer(payload, dtype=DTYPES[dtype])


@cache
def _silence() -> None:
    """torch warns about read-only memory once in a process: make it do that here, with the warning
    ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(memoryview(bytes(1)), dtype=torch.uint8)


def _private(size: int) -> tuple[torch.Tensor, None]:
    return torch.empty(size, dtype=torch.uint8), None


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
            # referred to by the list, the name here and the argument: by no view, and by no push whose end is
            # not known
            if len(found) == size and sys.getrefcount(found) == 3:
                self._all.append(self._all.pop(place))
                return found
        self._make_room(size)
        made = self._made(size) if self.bytes + size <= self._most_bytes else None
        self._all += [] if made is None else [made]
        return made

    def _make_room(self, size: int) -> None:
        """Forget memories of other sizes that nobody refers to, those that were not used for longest
        first."""
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


# ---------------------------------------------------------------- values in a narrower dtype


def cast_into(narrow: torch.Tensor, values: torch.Tensor) -> None:
    """`narrow` = `values`, of the same shape. Infinite and NaN stay so. Raises OverflowError for values
    beyond float16."""
    if narrow.dtype == torch.float16:
        low, high = torch.stack(torch.aminmax(values)).tolist()  # a GPU is waited for once
        largest = max(-low, high)
        if _FLOAT16_END <= largest < math.inf:
            msg = f"{largest:g} does not fit float16, which ends at 65504"
            raise OverflowError(msg)
    narrow.copy_(values)


def round_to(values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Round `values` **in place** to the dtype of `scratch`, which has the same shape and arbitrary content.

    If gradients are sent in a narrower dtype, every node of the canonical tree is rounded, lanes and root
    included. Then what is sent is exact, and the bits do not depend on which trainer computed which lanes.
    Raises as `cast_into`.
    """
    cast_into(scratch, values)
    values.copy_(scratch)
