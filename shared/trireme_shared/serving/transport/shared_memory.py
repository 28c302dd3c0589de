"""Memory that one process writes and others on the host may read: its owner has a Region, a reader has a Mapped.

    Region.create --offer--> {fd, name, size} over a UNIX stream --open_offered--> Mapped: the kernel allows reading only

The memory is an anonymous memfd. It has no name in a file system, so nothing can be guessed, and nothing has to be unlinked
however its owner ends. It is sealed: it can neither shrink nor grow, so no reader can hit its end (SIGBUS), and only the owner's
first mapping can write. A reader opens /proc/<the peer's pid, from the kernel>/fd/<number> and checks everything.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import InvalidArgument, Unauthorized
from trireme_shared.protocol.records.record import Record

ALIGNMENT_BYTES = 64
PAGE_BYTES = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid


class Offer(Record):
    """`memory`: the number by which the owner will refer to it; `fd` and `name`: of the memfd in the owner's process."""

    memory: int
    fd: int
    name: str
    size: int


class Region(mmap.mmap):
    """Our own memory: zeros at first, writable here, readable by peers it is offered to. Closed with its last view.

    `lost`: a peer may still read its content, but no one waits for that peer any more: do not write into it.
    """

    fd: int
    name: str
    lost: bool

    @classmethod
    def create(cls, size: int) -> Region:
        """Raises OSError where there is no sealed memfd. `size` in bytes, rounded up to pages."""
        size = -(-max(size, 1) // PAGE_BYTES) * PAGE_BYTES
        name = ids.new_id("trireme")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            region = cls(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(region, os.close, fd)
        region.fd, region.name, region.lost = fd, name, False
        return region

    def __repr__(self) -> str:
        return f"<Region {self.name}: {len(self)} bytes{', lost' if self.lost else ''}>"

    def offer(self, memory: int) -> Offer:
        return Offer(memory=memory, fd=self.fd, name=self.name, size=len(self))


def place_of(view: memoryview) -> tuple[Region, int] | None:
    """The region of a view, and the view's offset in it; None: it is in other memory. Only views of the region itself are recognised
    (memoryview(region)[a:b], not views of tensors over it)."""
    region = view.obj
    if not isinstance(region, Region) or view.readonly or not view.nbytes:
        return None
    return region, _address(view) - _address(region)


class Mapped(mmap.mmap):
    """Another process's memory, read only."""

    def part(self, offset: int, size: int) -> memoryview:
        """Raises InvalidArgument unless the part is inside and begins at a multiple of ALIGNMENT_BYTES."""
        if not (0 <= offset <= len(self) and 0 <= size <= len(self) - offset) or offset % ALIGNMENT_BYTES:
            msg = f"{size} bytes from {offset} of a memory of {len(self)}: they must lie inside, from a multiple of {ALIGNMENT_BYTES}"
            raise InvalidArgument(msg)
        return memoryview(self)[offset : offset + size]


def open_offered(offer: Offer, peer: int, at_most: int) -> Mapped:
    """Map memory that the process `peer` offers. Raises InvalidArgument if it fails a check or cannot be opened."""
    try:
        fd = _reopened(offer, peer)
        try:
            _check(fd, offer, at_most)
            return Mapped(fd, offer.size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        msg = f"memory {offer.name[:40]!r} of process {peer} cannot be mapped: {type(error).__name__}: {error}"
        raise InvalidArgument(msg) from error


def peer_of(transport_socket: Any) -> int:
    """The process at the other end of a UNIX socket. Raises Unauthorized if it runs as another user, InvalidArgument if it is
    not on this host or cannot be seen from here (another PID namespace)."""
    if transport_socket is None or transport_socket.family != socket.AF_UNIX:
        raise InvalidArgument("memory is shared over a UNIX socket only: payloads go through the stream")
    found = transport_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.geteuid():
        raise Unauthorized(f"the peer runs as user {uid}, this process as {os.geteuid()}: they share no memory")
    if pid < 1:
        raise InvalidArgument("the peer's process cannot be seen from here: payloads go through the stream")
    return int(pid)


def _reopened(offer: Offer, peer: int) -> int:
    """A read-only descriptor. The path may name any file by the time it is opened. So O_PATH first gets a reference (it has no
    effect on pipes and devices), the reference is checked, and then that same file is opened."""
    if not 0 <= offer.fd < 1 << 20:
        raise ValueError(f"descriptor {offer.fd}")
    pointer = os.open(f"/proc/{peer}/fd/{offer.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{pointer}"
        found = str(Path(own).readlink())
        if found != f"/memfd:{offer.name} (deleted)" or not stat.S_ISREG(os.fstat(pointer).st_mode):
            raise ValueError(f"descriptor {offer.fd} is {found[:80]!r}, which is not that memory")
        return os.open(own, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(pointer)


def _check(fd: int, offer: Offer, at_most: int) -> None:
    size = os.fstat(fd).st_size
    if size != offer.size or not 0 < size <= at_most:
        raise ValueError(f"it has {size} bytes, the offer says {offer.size}, at most {at_most} are allowed")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ValueError(f"its seals are {seals:#x}, {_SEALS:#x} are needed: it could shrink under its readers")
    if os.fstatvfs(fd).f_bsize != PAGE_BYTES:
        raise ValueError("it has huge pages, which may be missing when they are read")


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
