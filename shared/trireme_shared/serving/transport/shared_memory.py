"""Memory that one process writes and others on the host may read: its owner has a Region, a reader has a
Mapped. Nobody writes into another's memory.

    Region.create --offer--> {fd, name, size} over a UNIX stream
        --open_offered--> Mapped: the kernel allows reading only
    Lender:   region --number--> offered once, forgotten when it is gone
    Borrower: [number, offset, size] --> bytes

    who         writes here, cut from few large regions        lends it until                  peer reads
    server      values of blocks (RegionAllocator),            the trainer took the block or   gradients
                rows that were looked up (AnswerMemory)        the rows (ServerMemory)
    trainer     gradients of rows (GradientMemory), of blocks  its push is answered            values, rows

The memory is an anonymous memfd. It has no name in a file system, so nothing can be guessed, and nothing has
to be unlinked however its owner ends. It is sealed: it can neither shrink nor grow, so no reader can hit its
end (SIGBUS), and only the owner's first mapping can write. A reader opens /proc/<the peer's pid, from the
kernel>/fd/<number> and checks everything.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import stat
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from trireme_shared.blocks.buffers import LEAST_BYTES, Buffer, BufferPool, Home, ReusedMemory, rounded
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import (
    BadFrame,
    InvalidArgument,
    TooLarge,
    TriremeError,
    Unauthorized,
)
from trireme_shared.protocol.records.record import Record

ALIGNMENT_BYTES = 64
PAGE_BYTES = mmap.PAGESIZE
REGION_BYTES = 64 << 20  # of a region of blocks at least, and a quarter of what there is
# of a process, for rows that others read in place; what is beyond goes through the stream
MOST_BYTES = 256 << 20
MAX_MEMORIES = 256  # of one peer
WINDOW_BYTES = 8 << 20  # lent to one peer at most: it copies while we compute
MAX_LENT = 1024  # blocks
NOTHING = memoryview(bytearray())  # the payload of a block that refers to memory
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid

Place = tuple[int, int, int]
"""Number of a memory, offset, size in bytes."""

log = telemetry.logger("wire.regions")


class Offer(Record):
    """`memory`: the number by which the owner will refer to it; `fd` and `name`: of the memfd in the owner's
    process."""

    memory: int
    fd: int
    name: str
    size: int


class Region(mmap.mmap):
    """Our own memory: zeros at first, writable here, readable by peers it is offered to. Closed with its last
    view.

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
    """The region of a view, and the view's offset in it; None: it is in other memory. Only views of the
    region itself are recognised (memoryview(region)[a:b], not views of tensors over it)."""
    region = view.obj
    if not isinstance(region, Region) or view.readonly or not view.nbytes:
        return None
    return region, _address(view) - _address(region)


class Mapped(mmap.mmap):
    """Another process's memory, read only."""

    def part(self, offset: int, size: int) -> memoryview:
        """Raises InvalidArgument unless the part is inside and begins at a multiple of ALIGNMENT_BYTES."""
        if not (0 <= offset <= len(self) and 0 <= size <= len(self) - offset) or offset % ALIGNMENT_BYTES:
            msg = (
                f"{size} bytes from {offset} of a memory of {len(self)}: they must lie inside, from a "
                f"multiple of {ALIGNMENT_BYTES}"
            )
            raise InvalidArgument(msg)
        return memoryview(self)[offset : offset + size]


def open_offered(offer: Offer, peer: int, at_most: int) -> Mapped:
    """Map memory that the process `peer` offers. Raises InvalidArgument if it fails a check or cannot be
    opened."""
    try:
        fd = _reopened(offer, peer)
        try:
            _check(fd, offer, at_most)
            return Mapped(fd, offer.size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        msg = (
            f"memory {offer.name[:40]!r} of process {peer} cannot be mapped: {type(error).__name__}: {error}"
        )
        raise InvalidArgument(msg) from error


def peer_of(transport_socket: Any) -> int:
    """The process at the other end of a UNIX socket. Raises Unauthorized if it runs as another user,
    InvalidArgument if it is not on this host or cannot be seen from here (another PID namespace)."""
    if transport_socket is None or transport_socket.family != socket.AF_UNIX:
        raise InvalidArgument("memory is shared over a UNIX socket only: payloads go through the stream")
    found = transport_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.geteuid():
        raise Unauthorized(
            f"the peer runs as user {uid}, this process as {os.geteuid()}: they share no memory"
        )
    if pid < 1:
        raise InvalidArgument("the peer's process cannot be seen from here: payloads go through the stream")
    return int(pid)


def _reopened(offer: Offer, peer: int) -> int:
    """A read-only descriptor. The path may name any file by the time it is opened. So O_PATH first gets a
    reference (it has no effect on pipes and devices), the reference is checked, and then that same file is
    opened."""
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
        raise ValueError(
            f"its seals are {seals:#x}, {_SEALS:#x} are needed: it could shrink under its readers"
        )
    if os.fstatvfs(fd).f_bsize != PAGE_BYTES:
        raise ValueError("it has huge pages, which may be missing when they are read")


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---------------------------------------------------------------- memory that is cut from regions


def new_region(size: int) -> Region | None:
    """None where there is no sealed memfd; the log says why."""
    try:
        return Region.create(size)
    except OSError as error:
        log.info("memory_not_shared", cause=f"{type(error).__name__}: {error}")
        return None


class RegionAllocator:
    """Of one pool; private memory where regions cannot be made. Block by block malloc would take a fifth more
    than it gives."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._used = self._total = 0
        self._possible = True

    def __call__(self, size: int) -> tuple[torch.Tensor, Home | None]:
        size_there = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._region is None or self._used + size_there > len(self._region):
            self._begin(max(size_there, REGION_BYTES, self._total // 4))
        if self._region is None or not size:
            return torch.empty(size, dtype=torch.uint8), None
        region, offset = self._region, self._used
        self._used += size_there
        return torch.frombuffer(region, dtype=torch.uint8, count=size, offset=offset), (region, offset)

    def _begin(self, size: int) -> None:
        self._region, self._used = None, 0
        if not self._possible:
            return
        self._region = new_region(size)
        self._possible = self._region is not None
        self._total += size


class AnswerMemory:
    """Copies of rows that lookups found at one server, lent until they are taken. Sizes are rounded up to
    powers of two, so that few kinds of memory serve all."""

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
        """A buffer that begins with a copy of the payload, for the caller to release. None: it has to be
        sent."""
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
    """Gradients of one trainer's rows, in regions that its parameter servers read until nobody refers to them
    any more. Private memory where there is no other."""

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


# ---------------------------------------------------------------- what the two ends of one UNIX stream share


class Offers(Record):
    """New memories of the sender, and numbers that it does not use any more."""

    offers: tuple[Offer, ...] = ()
    forget: tuple[int, ...] = ()


class Lender:
    """Our regions that the peer was told of."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Region]] = {}
        self._numbers: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def number(self, region: Region) -> int | None:
        """None: the peer does not know it."""
        return self._numbers.get(region)

    def offers(self, regions: Iterable[Region]) -> Offers:
        """What the peer must be told before a frame refers to these regions."""
        new = tuple(self._offer(region) for region in regions if region not in self._numbers)
        return Offers(offers=new, forget=self._gone() if new else ())

    def _offer(self, region: Region) -> Offer:
        number, self._next = self._next, self._next + 1
        self._numbers[region], self._known[number] = number, weakref.ref(region)
        return region.offer(number)

    def _gone(self) -> tuple[int, ...]:
        """Numbers that the peer can forget: the regions do not exist any more."""
        dead = tuple(number for number, region in self._known.items() if region() is None)
        for number in dead:
            del self._known[number]
        return dead


class Borrower:
    """The memory of one peer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._mapped: dict[int, Mapped] = {}

    def __repr__(self) -> str:
        return f"<Borrower of process {self._peer}: {len(self._mapped)} memories>"

    def learn(self, offers: Offers, at_most: int) -> None:
        """Map the peer's new regions, of `at_most` bytes each. Raises InvalidArgument, TooLarge: the rest
        stay unknown."""
        for number in offers.forget:
            self._mapped.pop(number, None)  # its last view unmaps it
        for offer in offers.offers:
            if offer.memory in self._mapped or len(self._mapped) >= MAX_MEMORIES:
                msg = f"memory {offer.memory} is known already, or one of more than {MAX_MEMORIES}"
                raise TooLarge(msg)
            self._mapped[offer.memory] = open_offered(offer, self._peer, at_most)

    def payload(self, place: Place, sent: int) -> memoryview:
        """The bytes there, read only, of a block that has `sent` bytes of its own. Raises BadFrame,
        InvalidArgument."""
        number, offset, size = place
        mapped = self._mapped.get(number)
        if mapped is None:
            msg = f"memory {number} was never offered: it is one of {sorted(self._mapped)[:10]}"
            raise BadFrame(msg)
        if sent:
            msg = f"a block refers to memory and has {sent} bytes of its own: expected only one of both"
            raise BadFrame(msg)
        return mapped.part(offset, size)


def place_in(header: dict[str, Any]) -> Place | None:
    """Where a block's header says that its payload lies; None: the payload follows. Raises BadFrame."""
    at = header.pop("at", None)
    if at is None:
        return None
    if not isinstance(at, list) or len(at) != 3 or not all(type(number) is int for number in at):
        msg = f"a reference is {str(at)[:80]}: expected [memory, offset, size]"
        raise BadFrame(msg)
    return at[0], at[1], at[2]


class ServerMemory:
    """The server's end of one connection: blocks are read where they lie here, gradients where they lie at
    the peer. A buffer that the peer was referred to is retained until it says that it took the block. `peer`
    gives the process at its other end, or raises why memory cannot be shared with it. `answers`: of the
    server."""

    def __init__(self, peer: Callable[[], int], answers: AnswerMemory) -> None:
        self._peer, self._answers = peer, answers
        self._lender = Lender()
        self._borrower: Borrower | None = None
        self._lent: dict[int, deque[Buffer]] = {}
        self._bytes = self._blocks = 0
        # when the first of the lent blocks was lent, or the last one was taken
        self.moved = clock.monotonic()

    def __repr__(self) -> str:
        return f"<ServerMemory: {self._blocks} blocks lent, {self._borrower!r}>"

    def share(self, given: Offers, regions: Iterable[Region], most_bytes: int) -> Offers:
        """Map the peer's regions, of at most `most_bytes` each; returns offers of `regions`, if it is the
        first call: later ones are offered when something is lent, since what was lent must not overtake the
        offer. Raises Unauthorized, InvalidArgument, TooLarge: none or only some of its regions are mapped
        then."""
        first = self._borrower is None
        if self._borrower is None:
            self._borrower = Borrower(self._peer())
        self._borrower.learn(given, -(-most_bytes // PAGE_BYTES) * PAGE_BYTES)
        return self._lender.offers(regions) if first else Offers()

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a push's block refers to, which has `sent` bytes of its own; read only. Raises BadFrame,
        InvalidArgument."""
        if self._borrower is None:
            raise BadFrame("a block refers to memory: share it first")
        return self._borrower.payload(place, sent)

    # ------------------------------------------------------------ blocks for pulls

    @property
    def full(self) -> bool:
        return self._bytes >= WINDOW_BYTES or self._blocks >= MAX_LENT

    @property
    def lends(self) -> bool:
        """Whether a block is lent that was not taken yet."""
        return self._blocks > 0

    def lend_rows(self, number: int, rows: memoryview) -> tuple[Offers, Place] | None:
        """Where lookup `number` finds a copy of its rows, as `lend`; None: they have to be sent."""
        if self._borrower is None or self.full or (buffer := self._answers.copied(rows)) is None:
            return None
        lent = self.lend(number, buffer, rows.nbytes)
        if lent is None:
            buffer.release()
        return lent

    def lend(self, number: int, buffer: Buffer, size: int | None = None) -> tuple[Offers, Place] | None:
        """Where pull `number` finds a retained buffer, or its first `size` bytes; it is released here when
        the peer took it. With the offers that the peer needs before. None: the buffer has to be sent."""
        if self._borrower is None or buffer.home is None:
            return None
        region, offset = buffer.home
        new = self._lender.offers((region,))
        memory = self._lender.number(region)
        assert memory is not None
        if not self._blocks:
            self.moved = clock.monotonic()
        self._lent.setdefault(number, deque()).append(buffer)
        self._bytes += buffer.view.nbytes
        self._blocks += 1
        return new, (memory, offset, buffer.view.nbytes if size is None else size)

    def took(self, number: int, count: Any) -> None:
        """Pull `number`, which may have ended, has taken the next `count` blocks that were lent to it. Raises
        BadFrame."""
        lent = self._lent.get(number, deque())
        if type(count) is not int or not 0 < count <= len(lent):
            msg = f"pull {number} took {str(count)[:20]} blocks of {len(lent)} that it was lent"
            raise BadFrame(msg)
        for _ in range(count):
            self._give_back(lent.popleft())
        if not lent:
            del self._lent[number]
        self.moved = clock.monotonic()

    def close(self) -> None:
        """Everything lent is ours again: the connection is over, so the peer drops what it still reads."""
        for lent in self._lent.values():
            for buffer in lent:
                self._give_back(buffer)
        self._lent.clear()
        self._borrower = None

    def _give_back(self, buffer: Buffer) -> None:
        self._bytes -= buffer.view.nbytes
        self._blocks -= 1
        buffer.release()


class TrainerMemory:
    """The shared memory of one connection: gradients are read where they lie, parameters are copied from
    where they are. `on`: each end reads the other's memory. `unreadable`: we cannot map what the pserver
    offers."""

    def __init__(self, name: str) -> None:
        self.unreadable = False
        self._name = name
        self.lender = Lender()
        self._borrower: Borrower | None = None
        self._lends = False

    @property
    def on(self) -> bool:
        return self._borrower is not None

    def begin(self, peer: int, offers: Offers) -> None:
        """The pserver, process `peer`, agreed. Raises InvalidArgument, TooLarge: its memory cannot be
        mapped."""
        borrower = Borrower(peer)
        self._learn(borrower, offers)
        self._borrower, self._lends = borrower, True

    def learn(self, offers: Offers) -> None:
        """Raises as `begin`, BadFrame before it."""
        self._learn(self._known(), offers)

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a pulled block refers to, which has `sent` bytes of its own. Raises BadFrame,
        InvalidArgument."""
        return self._known().payload(place, sent)

    def close(self) -> None:
        """The connection is over: the peer's memory is unmapped at once, not when the interpreter finds what
        refers to the connection. Each mapping has a descriptor, and keeps the memory of a peer that has
        ended."""
        self._borrower, self._lends = None, False

    # ------------------------------------------------------------ lending gradients

    def home_of(self, payload: memoryview) -> tuple[Region, int] | None:
        """Where the pserver could read it, after it was offered the region; None: it has to be sent."""
        home = place_of(payload) if self._lends else None
        return home if home is not None and home[1] % ALIGNMENT_BYTES == 0 else None

    def lend_no_more(self, cause: TriremeError) -> None:
        log.info("gradients_not_shared", peer=self._name, cause=cause.message)
        self._lends = False

    # ------------------------------------------------------------ parts

    def _known(self) -> Borrower:
        if self._borrower is None:
            raise BadFrame(f"{self._name} referred to its memory, which it does not share")
        return self._borrower

    def _learn(self, borrower: Borrower, offers: Offers) -> None:
        try:
            borrower.learn(offers, sys.maxsize)
        except TriremeError:
            self.unreadable = True
            raise
