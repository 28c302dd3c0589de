"""A torch.distributed group of one epoch, built directly: no init_process_group, no global group, nothing
that outlives it.

    device (it listens) ─► statements name where ─► connect all pairs ─► operations
        ─► cut (connections shut down) ─► drop

Gloo carries what members say to each other (`exchange`) always, and tensors on CPUs; NCCL carries tensors on
GPUs. Both have the same operations, all of them with a time limit. An error is told as text: a kept exception
would keep the group.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store  # torch.distributed exports it only where types are not checked

from trireme_shared.platform.runtime import clock

POLL_S = 0.1
NCCL_POLL_S = 0.0005
CUT_S = 0.3  # so long an operation may take to notice that its connections were shut down
GROUP_PARTS = ("group", "store")
CHUNK_BYTES = 4 << 20  # several operations under way at once are faster than one large
CONNECTS = 5  # so many times its time limit Gloo waits for a connection

GLOO: Any = c10d.ProcessGroupGloo  # what is used of it is not typed
_devices = threading.Lock()


class Broken(Exception):
    """The group is of no use any more: a peer is gone or frozen, or the operation's time is over."""


class Device:
    """What a Gloo group listens with, one for each group. `address`: where; None if that could not be found
    out, and then the group cannot be cut: its operations end by their timeouts."""

    def __init__(self, host: str) -> None:
        with _devices:
            before = listening_addresses()
            self.gloo: Any = GLOO.create_device(hostname=host)
            new = listening_addresses() - before
        self.address: Address | None = next(iter(new)) if len(new) == 1 else None


class Group:
    """`data`: carries tensors, if it is not Gloo. `peers`: where the others listen. `timeout_s`: to be
    connected with all. All operations raise Broken."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        device: Device,
        peers: Sequence[Address | None],
        timeout_s: float,
    ) -> None:
        options = GLOO._Options()  # noqa: SLF001  its only name
        options._devices = [device.gloo]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s / CONNECTS)  # noqa: SLF001
        store.set_timeout(timedelta(seconds=timeout_s))  # what the others say is waited for once
        self.rank, self.size = rank, size
        self._address, self._peers = (
            device.address,
            {peer for peer in peers if peer is not None} - {device.address},
        )
        self._store: c10d.Store | None = store  # Gloo does not keep it
        self._lock = threading.Lock()
        self._cut_at = math.inf
        self._stuck: list[Any] = []  # operations that do not end
        self._gloo: Any = _built(lambda: GLOO(store, rank, size, options))
        self.data_device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.size}>"

    # ------------------------------------------------------------ what members say

    def exchange(self, mine: Sequence[int], timeout_s: float) -> list[list[int]]:
        """The numbers (int64) of every member by rank. All members give equally many."""
        given = torch.tensor(mine, dtype=torch.int64)
        taken = [torch.empty_like(given) for _ in range(self.size)]
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._await([lambda: self._gloo.allgather([taken], [given], options)])
        return [each.tolist() for each in taken]

    def gather_bytes(self, mine: bytes, timeout_s: float) -> list[bytes]:
        """What every member gives, by rank; of any length."""
        lengths = [each[0] for each in self.exchange([len(mine)], timeout_s)]
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        given = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        taken = [torch.empty_like(given) for _ in range(self.size)]
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._await([lambda: self._gloo.allgather([taken], [given], options)])
        return [each[:length].numpy().tobytes() for each, length in zip(taken, lengths, strict=True)]

    def tell(self, data: bytes | None, root: int, timeout_s: float) -> bytes:
        """The root's bytes, to all."""
        mine = len(data) if data is not None else 0
        length = self.exchange([mine], timeout_s)[root][0]
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(length, dtype=torch.uint8)
        )
        if length:
            self._await(self._broadcasts(self._gloo, buffer, root, timeout_s))
        return buffer.numpy().tobytes()

    # ------------------------------------------------------------ tensors

    def allreduce(self, flats: Sequence[torch.Tensor], timeout_s: float, begun: Callable[[], None]) -> None:
        """Sums, in place, of one-dimensional tensors. `begun` is called when all is on its way."""
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp(c10d.ReduceOp.SUM)
        options.timeout = timedelta(seconds=timeout_s)
        calls = [partial(self._data.allreduce, [part], options) for flat in flats for part in _chunks(flat)]
        self._await(calls, begun)

    def broadcast(
        self, flats: Sequence[torch.Tensor], root: int, timeout_s: float, begun: Callable[[], None]
    ) -> None:
        """The root's values, in place. They go as bytes: there are dtypes that Gloo does not know."""
        parts = [flat.view(torch.uint8) for flat in flats]
        self._await(
            [call for part in parts for call in self._broadcasts(self._data, part, root, timeout_s)], begun
        )

    def scatter_all(
        self,
        given: torch.Tensor,
        taken: torch.Tensor,
        timeout_s: float,
        begun: Callable[[], None],
        sizes: Sequence[int] = (),
    ) -> None:
        """`given` has a part for each member in order, all of one size; `taken` gets the parts that are for
        this one, by rank. `sizes`: elements of each of those, if members give parts of different sizes."""
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout_s)
        own = [given.numel() // self.size] * self.size if sizes else []
        self._await([lambda: self._data.alltoall_base(taken, given, list(sizes), own, options)], begun)

    def gather_all(self, given: torch.Tensor, taken: torch.Tensor, timeout_s: float) -> None:
        """`taken` gets the parts of all members by rank."""
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        # its only name
        self._await([lambda: self._data._allgather_base(taken, given, options)])  # noqa: SLF001

    def _broadcasts(
        self, backend: Any, flat: torch.Tensor, root: int, timeout_s: float
    ) -> list[Callable[[], Any]]:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=timeout_s)
        return [partial(backend.broadcast, [part], options) for part in _chunks(flat)]

    @property
    def _data(self) -> Any:
        return self._gloo

    def _await(self, calls: Sequence[Callable[[], Any]], begun: Callable[[], None] | None = None) -> None:
        """Begin all, then wait for all. Raises Broken."""
        works: list[Any] = []
        futures: list[Any] = []
        trouble = ""
        ended = threading.Semaphore(0)
        try:
            for call in calls:
                works.append(call())
                futures.append(works[-1].get_future())
                futures[-1].add_done_callback(lambda _: ended.release())
            if begun is not None:
                begun()
        except RuntimeError as error:
            trouble = str(error)
        for work, future in zip(works, futures, strict=True):
            while not self._has_ended(work, future, ended):
                if clock.monotonic() > self._cut_at + CUT_S:
                    self._stuck.extend(works)
                    raise Broken(trouble or "it was cut")
            try:
                work.wait()
            except RuntimeError as error:
                if not trouble:
                    trouble = str(error)
                    self.cut()  # the others of this batch would wait for their timeouts
        works.clear()
        futures.clear()
        if trouble:
            raise Broken(trouble.partition("\n")[0][:500])

    def _has_ended(self, work: Any, future: Any, ended: threading.Semaphore) -> bool:  # noqa: ARG002
        """Waits a moment for it. Not by `work.wait()`: where a connection breaks while Gloo sends, that
        returns at the timeout only."""
        return bool(future.done()) or (ended.acquire(timeout=POLL_S) and bool(future.done()))

    # ------------------------------------------------------------ end

    def cut(self) -> int:
        """From any thread: operations under way fail within milliseconds. Answers how many connections were
        shut down."""
        with self._lock:
            self._cut_at = min(self._cut_at, clock.monotonic())
            return cut_connections(self._address, self._peers)

    def drop(self) -> None:
        """Give it up: cut, then free. Operations that do not end although they were cut keep it until their
        time is over."""
        self.cut()
        kept, self._stuck = [*self._stuck, self._gloo, self._store], []
        self._gloo = self._store = None
        if len(kept) > len(GROUP_PARTS):
            threading.Thread(target=_bury, args=(kept,), name="trireme-group-end", daemon=True).start()


class NcclGroup(Group):
    """Tensors of this process's GPU go by NCCL. `cut` aborts from another thread, as NCCL wants it: neither
    shutdown nor destroy, which flush and may hang."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        store, rank, size, timeout_s = args[0], args[1], args[2], args[5]
        self.data_device = torch.device("cuda", torch.cuda.current_device())
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options.config.blocking = 0
        self._nccl: Any = _built(
            lambda: c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)
        )
        _built(lambda: self._nccl.eager_connect_single_device(self.data_device))

    @property
    def _data(self) -> Any:
        return self._nccl

    def _has_ended(self, work: Any, future: Any, ended: threading.Semaphore) -> bool:  # noqa: ARG002
        """A future of NCCL is done as soon as its kernel is queued."""
        if not work.is_completed():
            clock.sleep(NCCL_POLL_S)
            return False
        return True

    def cut(self) -> int:
        with self._lock:
            nccl = self._nccl
        if nccl is not None:
            nccl.abort()
        return super().cut()

    def drop(self) -> None:
        super().drop()
        self._nccl = None


def nccl_is_there() -> bool:
    return torch.cuda.is_available() and distributed.is_nccl_available()


def _built(build: Callable[[], Any]) -> Any:
    """Raises Broken."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001  what torch and its C++ raise
        trouble = str(error)
    # not in the handler: the error would be its context, with the frames that it went through
    raise Broken(f"the group could not be built: {trouble}")


def _bury(kept: list[Any]) -> None:
    """Operations first, then the group: its end waits for them."""
    for each in kept:
        if hasattr(each, "wait") and not isinstance(each, c10d.Store):
            with suppress(RuntimeError):
                each.wait()
    kept.clear()


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    size = max(1, CHUNK_BYTES // flat.element_size())
    return [flat[first : first + size] for first in range(0, flat.numel(), size)]


Address = tuple[str, int]
FOLDER = "/dev/fd"


def listening_addresses() -> set[Address]:
    """Where this process accepts TCP connections."""
    return {own for taken, own, peer in _sockets() if peer is None and _accepts(taken)}


def cut_connections(own: Address | None, peers: Collection[Address]) -> int:
    """Shut down the connections that came in at `own` or go to one of `peers`. Answers how many. torch does
    not show the sockets of a group, so they are found by their addresses.

    A group's operation that waits for a dead or frozen peer ends only by its timeout, or when its sockets
    break. The listening socket is never touched: Gloo ends the process when that fails.
    """
    count = 0
    for taken, local, peer in _sockets():
        if peer is None or _accepts(taken) or not (local == own or peer in peers):
            continue
        with suppress(OSError):
            taken.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _sockets() -> Iterator[tuple[socket.socket, Address, Address | None]]:
    """(socket, own address, the peer's or None) of each TCP socket. It is a duplicate, made before its
    address was read: a number that is used for another socket meanwhile does no harm."""
    for name in os.listdir(FOLDER):  # noqa: PTH208  it changes while it is read
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            taken = socket.socket(fileno=os.dup(int(name)))
        except (OSError, ValueError):
            continue
        with taken:
            if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
                continue
            try:
                own = taken.getsockname()[:2]
            except OSError:
                continue
            try:
                peer = taken.getpeername()[:2]
            except OSError:
                peer = None
            yield taken, own, peer


def _accepts(taken: socket.socket) -> bool:
    try:
        return bool(taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


TIMEOUT_S = 10.0


class Shelf(Protocol):
    """Where the values of an epoch are; calls block, from any thread, and raise TimeoutError or
    Superseded."""

    def put(self, name: str, value: bytes, timeout_s: float) -> None: ...

    def take(self, names: list[str], timeout_s: float) -> list[bytes]:
        """The values, as soon as all are there."""
        ...

    def held(self, names: list[str]) -> bool:
        """Whether all are there now."""
        ...


class EtcdStore(Store):
    """The rendezvous store of one epoch's group, over etcd: what a member sets reaches the others by the
    watch that they have anyway.

    No member hosts anything. Each key is written once, hangs on the lease of who wrote it, and is deleted
    with the epoch by the decider. Keep a reference to the store as long as the group.
    """

    def __init__(self, shelf: Shelf, prefix: str, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self._shelf, self._prefix, self._timeout_s = shelf, prefix, timeout_s

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._shelf.put(self._prefix + key, data, self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._shelf.take([self._prefix + key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = max(timeout.total_seconds() if timeout is not None else 0.0, self._timeout_s)
        self._shelf.take([self._prefix + key for key in keys], limit_s)

    def check(self, keys: list[str]) -> bool:
        return self._shelf.held([self._prefix + key for key in keys])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
