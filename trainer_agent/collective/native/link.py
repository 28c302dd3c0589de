"""A native group of the trainers with lanes of one generation, and how they meet: each says in etcd where it
listens and what it has.

statement ─► all statements ─► made alike? ─► whoever lacks the newest version gets it ─► torch's group
    ─► operations ─► cut, drop

`attempt`: how often the generation's group was built before; nothing of an earlier one can reach a later one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainer_agent.collective.native.reducing import Scratch
from trireme_shared.collective.group import Broken, Device, EtcdStore, Group, NcclGroup, nccl_is_there
from trireme_shared.collective.records import GLOO, NCCL
from trireme_shared.platform.etcd import Etcd, LeaseLost, OutcomeUnknown, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.containment import backoff_s
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.records.record import Record

BUILD_S = 10.0
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.1
TOLD_AGAIN_S = 30.0
MEETING_S = 120.0  # whoever is not there by then is missed by the job long since: a statement was lost
LIMIT_S = 5.0  # of one call to etcd
FLOOR_S, MOST_S = 10.0, 300.0
TIMES = 10.0
REMEMBERED = 32

T = TypeVar("T")
log = telemetry.logger("native")


class NativeStatement(Record):
    """What a trainer says before its group is built. `version`: the one that it has. `received`: the
    generation in which the next one was made, which it has received whole (-1: none). `listener`: where its
    group listens. `network`: see own_network. `manifest`: what all must have alike."""

    trainer: str
    version: int
    received: int = -1
    listener: tuple[str, int] | None = None
    network: str
    manifest: dict[str, str]


class Overtaken(Broken):
    """Others build the group a further time. `attempt`: theirs."""

    def __init__(self, attempt: int) -> None:
        super().__init__(f"others are at attempt {attempt}")
        self.attempt = attempt


@dataclass(frozen=True, slots=True)
class Meeting:
    """One attempt to build the group of a generation. `base`: prefix of the generation's keys in etcd."""

    etcd: Etcd
    base: str
    attempt: int
    lease_id: Callable[[], int]
    rank: int
    size: int

    @property
    def prefix(self) -> str:
        return f"{self.base}{self.attempt}/"

    async def statements(self, mine: NativeStatement) -> list[NativeStatement]:
        """Of all, by rank, as soon as all are there. Raises Broken: also if some are not there within
        MEETING_S; then all state anew what they have."""
        await self.put(f"statements/{self.rank}", mine.to_bytes())
        names = [f"statements/{rank}" for rank in range(self.size)]
        try:
            async with asyncio.timeout(MEETING_S):
                values = await self.values(names)
        except TimeoutError:
            raise Broken(
                f"waited {MEETING_S:g} s for the statements of {self.size} trainers at {self.prefix}"
            ) from None
        found = [read_record(NativeStatement, name, value) for name, value in zip(names, values, strict=True)]
        read = [each for each in found if each is not None]
        if len(read) < self.size:
            raise Broken("a trainer says what cannot be read: is it of another version of Trireme?")
        return read

    async def values(self, names: list[str]) -> list[bytes]:
        """As soon as all are there; whoever awaits it sets a limit. Raises Overtaken."""
        pause_s, told = FIRST_LOOK_S, clock.monotonic()
        while True:
            there = await self.check()
            found = [there.get(f"{self.attempt}/{name}") for name in names]
            read = [value for value in found if value is not None]
            if len(read) == len(names):
                return read
            if clock.monotonic() > told + TOLD_AGAIN_S:
                told = clock.monotonic()
                missing = [name for name, value in zip(names, found, strict=True) if value is None]
                log.warning("waits_for_trainers", missing=missing, prefix=self.prefix)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    async def check(self) -> dict[str, bytes]:
        """What is there of all attempts of the generation; nothing if etcd does not answer. Raises
        Overtaken."""
        try:
            kvs = (await self.etcd.range(self.base, prefix=True, timeout_s=LIMIT_S)).kvs
        except PeerError:
            return {}  # asked again
        there = {kv.key.removeprefix(self.base): kv.value for kv in kvs}
        attempts = [int(number) for key in there if (number := key.partition("/")[0]).isdecimal()]
        if (newest := max(attempts, default=0)) > self.attempt:
            raise Overtaken(newest)
        return there

    async def put(self, name: str, value: bytes) -> None:
        """Raises Broken: etcd does not take it; a later attempt may succeed."""
        put = Put(self.prefix + name, value, self.lease_id())
        try:
            try:
                await self.etcd.txn((), [put], timeout_s=LIMIT_S)
            except OutcomeUnknown:  # the same value again does no harm
                await self.etcd.txn((), [put], timeout_s=LIMIT_S)
        except (PeerError, LeaseLost) as error:
            raise Broken(f"etcd did not take {name}: {error}") from None

    async def forget(self) -> None:
        """All have met: nobody reads these keys any more. What stays ends with the leases."""
        with suppress(PeerError):
            await self.etcd.delete(self.prefix, prefix=True, timeout_s=LIMIT_S)


class _Shelf:
    """The meeting's values for the thread that builds the group."""

    def __init__(self, meeting: Meeting, over: threading.Event) -> None:
        self._meeting, self._over = meeting, over
        self._loop = asyncio.get_running_loop()

    def put(self, name: str, value: bytes, timeout_s: float) -> None:
        self._wait(self._meeting.put(name, value), timeout_s)

    def take(self, names: list[str], timeout_s: float) -> list[bytes]:
        found: list[bytes] = self._wait(self._meeting.values(names), timeout_s)
        return found

    def held(self, names: list[str]) -> bool:
        return bool(self.take(names, BUILD_S))

    def _wait(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = clock.monotonic() + timeout_s
        while not self._over.is_set() and clock.monotonic() < deadline:
            with suppress(TimeoutError):
                return future.result(LAST_LOOK_S)
        future.cancel()
        raise TimeoutError(f"{self._meeting.prefix} is over, or was not complete within {timeout_s:g} s")


class Link:
    """`group` None: this trainer is alone. All of torch's operations run in one thread, in order. `limit`: of
    each, in seconds. `cut` it from the event loop, at once; `close` it when its user is done."""

    def __init__(self, host: str, backend: str, threads: int, limit: OperationLimit) -> None:
        self.group: Group | None = None
        self.limit = limit
        self.scratch = Scratch()  # not another group's: an operation that was cut may still write there
        self._host, self._backend = host, backend
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1, "native", torch.set_num_threads, (threads,))
        self._device: Device | None = None
        self._running: asyncio.Future[Any] | None = None
        self._builds = False  # what runs is the group's construction, if anything does

    def __repr__(self) -> str:
        return f"<Link over {self._backend}: {self.group!r}>"

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def is_cut(self) -> bool:
        return self._over.is_set()

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises what `work` raises. Cancelled: it returns at once, and `work` ends when the group is cut,
        see `idle`."""
        self._running = asyncio.wrap_future(self._thread.submit(_frameless, work, *arguments))
        self._running.add_done_callback(self._ended)
        result: T = await asyncio.shield(self._running)
        return result

    async def idle(self) -> None:
        """Until nothing runs in the thread, which reads and writes memory of others. If cancelled, it raises
        that when nothing runs any more.

        A group that is being built touches no memory yet. Once it is cut it is not waited for: nothing ends
        that but its time limit, if a peer has gone on to the next generation without connecting."""
        cancelled: asyncio.CancelledError | None = None
        while self._running is not None and not self._running.done():
            if self._builds and self._over.is_set():
                break
            try:
                await asyncio.wait([self._running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _ended(self, ran: asyncio.Future[Any]) -> None:
        """It is not kept: its result may be what the group listens with, its error refers to this."""
        if not ran.cancelled():
            ran.exception()  # if nobody waits for it any more, it is an error of nobody
        if self._running is ran:
            self._running = None

    async def listen(self) -> tuple[str, int] | None:
        self._device = await self.call(Device, self._host)
        return self._device.address

    async def connect(self, meeting: Meeting, statements: list[NativeStatement]) -> None:
        """Raises Broken."""
        store = EtcdStore(_Shelf(meeting, self._over), "group/", BUILD_S)
        kind = NcclGroup if self._backend == NCCL else Group
        peers = [each.listener for each in statements]

        def build() -> None:
            assert self._device is not None
            group = kind(store, meeting.rank, meeting.size, self._device, peers, BUILD_S)
            self.group = group
            if self._over.is_set():
                group.drop()
                raise Broken("the generation is over")

        self._builds = True
        await self.call(build)
        self._builds = False

    def cut(self) -> None:
        """Operations under way, and later ones, fail."""
        self._over.set()
        if self.group is not None:
            self.group.cut()

    def close(self) -> None:
        """Give it up. It is freed in its thread, as soon as that has noticed."""
        self.cut()
        with suppress(RuntimeError):  # it was closed before
            self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    def _drop(self) -> None:
        group, self.group, self._device = self.group, None, None
        if group is not None:
            group.drop()


def _frameless(work: Callable[..., T], *arguments: Any) -> T:
    """A group has descriptors and threads, and the frames in which it broke refer to it. An error that went
    through several tasks is freed as late as Python looks for circles, so it must not have them."""
    try:
        return work(*arguments)
    except Broken as error:
        raise error.with_traceback(None)  # noqa: B904  it is the same


def check_alike(statements: list[NativeStatement]) -> None:
    """Raises InvalidArgument, with the same text in all trainers; the group is not built then: Gloo would end
    the process, or say nothing."""
    first = statements[0]
    for other in statements[1:]:
        for name in sorted(first.manifest.keys() | other.manifest.keys()):
            mine, theirs = first.manifest.get(name, "none"), other.manifest.get(name, "none")
            if mine != theirs:
                msg = (
                    f"trainers exchange gradients differently: {name} is {mine} in {first.trainer} and "
                    f"{theirs} in {other.trainer}"
                )
                raise InvalidArgument(msg, hint="run the same version and the same script everywhere")


def backend_of(wanted: str) -> str:
    """gloo or nccl. Raises InvalidArgument: nccl without a GPU."""
    if wanted == NCCL and not nccl_is_there():
        raise InvalidArgument(
            "backend is nccl, but this process has no GPU, or its torch has no NCCL",
            hint="use backend gloo, or auto",
        )
    return wanted if wanted != "auto" else NCCL if nccl_is_there() else GLOO


class OperationLimit:
    """How long an operation of a native group may take: what steps of one trainer took, many times over, and
    never less than a floor.

    no step was measured ─► MOST_S
    steps are measured ─► TIMES x the longest of the last, between FLOOR_S and MOST_S
    an operation ran out of time ─► twice as long, until a step is finished

    Members compute beside the operations of others, so too short a limit would break groups of members that
    are only slow; a broken group costs milliseconds.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._ran_out = 0

    def __repr__(self) -> str:
        return f"<OperationLimit: {self.seconds:g} s after {len(self._steps)} steps>"

    @property
    def seconds(self) -> float:
        """The limit at present."""
        if not self._steps:
            return MOST_S
        usual = max(FLOOR_S, TIMES * max(self._steps))
        return backoff_s(self._ran_out + 1, usual, MOST_S)

    def took(self, seconds: float) -> None:
        """A step was finished in that time."""
        self._steps.append(seconds)
        self._ran_out = 0

    def broke(self, after_s: float) -> None:
        """An operation failed so long after the step began."""
        if after_s >= self.seconds < MOST_S:
            self._ran_out += 1
