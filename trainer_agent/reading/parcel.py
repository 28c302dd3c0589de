"""Messages between a trainer and the processes that read for it: any object, over a socket of UNIX.

    object ──pickle 5──► content, arrays ─► socket
                                  └─ many bytes: anonymous memory, whose descriptor goes over the socket
    receive ─► Parcel ──opened()──► the object, in memory of its own

Memory has no name in the file system: it is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import array
import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: bytes of the content, arrays, bytes of all arrays, `records`, whether arrays are in memory, descriptors
HEAD = struct.Struct("<QQQqBB")
MOST_INLINE = 256 << 10  # bytes of arrays; above it copies through the socket cost more than memory
LEAST_BESIDE = 1 << 10  # bytes of one array; smaller ones are part of the content
MOST_DESCRIPTORS = 4
PART = 1 << 30  # Linux writes no more than 2 GiB at once
Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message as it came. `records`: how many a batch has; -1: it is no batch."""

    records: int
    content: bytes
    arrays: bytes | mmap.mmap
    sizes: Sequence[int]

    def opened(self) -> Any:
        """Whoever opens it may change what it gets: opened again, it is as it was sent."""
        copies, start = [], 0
        with memoryview(self.arrays) as view:
            for size in self.sizes:
                copy = torch.empty(size, dtype=torch.uint8).numpy()  # aligned as torch aligns tensors
                copy[:] = memoryview(view[start : start + size])
                copies.append(copy.data)
                start += size
        return pickle.loads(self.content, buffers=copies)  # noqa: S301  of a process of our own


def send(
    connection: socket.socket, message: object, records: int = -1, descriptors: Sequence[int] = ()
) -> None:
    """Blocks. Nothing is sent if `message` cannot be pickled, which raises anything."""
    arrays: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LEAST_BESIDE:
            return True
        arrays.append(raw)
        return False

    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=keep).dump(message)
    sizes = array.array("Q", [each.nbytes for each in arrays])
    total, given = sum(sizes), list(descriptors)
    memory = _memory_of(arrays) if total > MOST_INLINE else None
    try:
        if memory is not None:
            given.append(memory)
        head = HEAD.pack(content.tell(), len(sizes), total, records, memory is not None, len(given))
        sent = socket.send_fds(connection, [head], given)
        connection.sendall(head[sent:])
        connection.sendall(content.getbuffer())
        connection.sendall(sizes.tobytes())
        if memory is None:
            for each in arrays:
                connection.sendall(each)
    finally:
        if memory is not None:
            os.close(memory)


def receive(connection: socket.socket, check: Check | None = None) -> tuple[Parcel, list[int]]:
    """The next message, and the descriptors that were given with it. `check`: called each time that nothing
    came within the timeout of the socket; it may raise. Raises EOFError if the other side has gone."""
    head, descriptors = b"", list[int]()
    try:
        while len(head) < HEAD.size:
            try:
                found, given, _, _ = socket.recv_fds(connection, HEAD.size - len(head), MOST_DESCRIPTORS)
            except TimeoutError:
                _checked(check)
                continue
            if not found:
                raise EOFError
            head, descriptors = head + found, descriptors + given
        size, count, total, records, beside, _ = HEAD.unpack(head)
        content = _exactly(connection, size, check)
        sizes = array.array("Q", _exactly(connection, 8 * count, check))
        if not beside:
            return Parcel(records, content, _exactly(connection, total, check), sizes), descriptors
        memory = descriptors.pop()
        try:
            return Parcel(records, content, mmap.mmap(memory, total, prot=mmap.PROT_READ), sizes), descriptors
        finally:
            os.close(memory)
    except ConnectionError as error:
        _close(descriptors)
        raise EOFError from error
    except BaseException:
        _close(descriptors)
        raise


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _exactly(connection: socket.socket, size: int, check: Check | None) -> bytes:
    found = bytearray(size)
    view, start = memoryview(found), 0
    while start < size:
        try:
            received = connection.recv_into(view[start : start + PART])
        except TimeoutError:
            _checked(check)
            continue
        if not received:
            raise EOFError
        start += received
    return bytes(found)


def _checked(check: Check | None) -> None:
    if check is not None:
        check()


def _memory_of(arrays: Sequence[memoryview]) -> int:
    """A descriptor."""
    memory = os.memfd_create("trireme-batch")
    try:
        for each in arrays:
            start = 0
            while start < each.nbytes:
                start += os.write(memory, each[start : start + PART])
    except BaseException:
        os.close(memory)
        raise
    return memory


class _Pickler(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        """Plain tensors are pickled as arrays, which are not copied on the way; all others as torch does."""
        plain = (
            type(found) is torch.Tensor
            and found.layout is torch.strided
            and found.device.type == "cpu"
            and found.is_contiguous()
            and not (found.requires_grad or found.is_quantized or found.is_conj() or found.is_neg())
            and found.numel() > 0
        )
        if not plain:
            return NotImplemented
        raw = found.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), found.dtype, tuple(found.shape))


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if isinstance(raw, bytes | bytearray):  # part of the content: not aligned as torch aligns tensors
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)
