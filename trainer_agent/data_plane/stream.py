"""The trainer's end of streams (shared/trireme_shared/serving/transport/stream.py): one connection to each
server of blocks, pushes and pulls at the same time.

    none --first call--> connected --calls, by id--> ...
        --an error, a timeout, a cancelled call--> none, calls in flight fail

A call that does not come to its end takes the connection with it: no byte of it can arrive anywhere
afterwards. The next call connects again.

TrainerStream is such a connection with its calls in flight, by id, and the memory that both ends share:

    call ─► frames ─► answered
    given up before its answer, or what came with an answer is lost ─► the connection is over
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import lru_cache, partial
from itertools import count
from typing import Any

from trainer_agent.data_plane.http import HttpPserver, Placed, PserverPort, Sink
from trainer_agent.settings import Settings
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, http, telemetry
from trireme_shared.protocol.errors import (
    AnotherProcess,
    BadFrame,
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PeerError,
    TriremeError,
    from_map,
)
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import (
    PserverMember,
    Record,
)
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import (
    LookupEnd,
    LookupIds,
    LookupRequest,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
)
from trireme_shared.serving.transport.shared_memory import (
    NOTHING,
    Offers,
    Place,
    Region,
    TrainerMemory,
    peer_of,
    place_in,
)
from trireme_shared.serving.transport.stream import (
    HEAD_COST_BYTES,
    HEADS,
    FrameStream,
    NotReached,
    UpgradeRefused,
    socket_of,
    upgrade,
)
from trireme_shared.tables.payload import MOST_BYTES

CLOSE_S = 2.0
CONNECT_S = 2.0
log = telemetry.logger("stream")


class _Call:
    """One request in flight; `answer` is its last frame. `lent`: the regions that the pserver may read for
    it."""

    def __init__(self, sink: Sink | None = None, placed: Placed | None = None) -> None:
        self.sink, self.placed = sink, placed
        self.rows = NOTHING  # of a lookup, whose payload comes here
        self.lent: set[Region] = set()
        self.took = 0  # blocks copied out of the pserver's memory, of which it was not told yet
        self.answer: asyncio.Future[codec.Fields] = asyncio.get_running_loop().create_future()


class TrainerStream(FrameStream):
    """The trainer's end. `name`: of the peer, for messages."""

    def __init__(self, name: str) -> None:
        super().__init__(codec.Limits(payload_bytes=1 << 32, blocks=0, header_bytes=64 << 20))
        self._name = name
        self.calls: dict[int, _Call] = {}
        self._writable = asyncio.Event()
        self._lost = asyncio.Event()
        self._into: _Call | None = None
        self._item: PulledBlock | None = None
        self.memory = TrainerMemory(name)
        # nothing refers to a region before it is known whether the peer reads it
        self._offering = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<TrainerStream to {self._name}: {len(self.calls)} calls>"

    @property
    def usable(self) -> bool:
        return not self.closed and self.failure is None

    @contextmanager
    def call(
        self, kind: str, message: Record, sink: Sink | None = None, placed: Placed | None = None
    ) -> Iterator[tuple[int, _Call]]:
        """Opens a request; leaving before its answer closes the connection."""
        # few numbers: headers come again
        number = next(number for number in count(1) if number not in self.calls)
        call = self.calls[number] = _Call(sink, placed)
        try:
            self.send_map({"id": number, "call": kind, "message": codec.plain(message)})
            yield number, call
        finally:
            if not call.answer.done() or call.answer.cancelled():
                self.fail(PeerError(f"a {kind} at {self._name} was given up"))
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # marks it as seen
            self.calls.pop(number, None)

    async def taken(self, limit_s: float) -> None:
        """Wait until the transport refers to nothing that was sent, and it is the stream's turn. Raises
        DeadlineExceeded, and why the stream is over."""
        while (self.paused or self.rests) and self.usable:
            since = self.paused_at if self.paused else clock.monotonic()
            self._writable.clear()
            try:
                async with asyncio.timeout_at(since + limit_s):
                    await self._writable.wait()
            except TimeoutError as error:
                raise self._silent(limit_s) from error
        if not self.usable:
            raise self.failure or PeerError(f"{self._name} closed the stream")

    async def answered(self, call: _Call, limit_s: float) -> codec.Fields:
        """The last frame. Raises the error it carries; DeadlineExceeded if nothing comes from the peer for
        `limit_s`."""
        start = clock.monotonic()
        while not call.answer.done():
            try:
                async with asyncio.timeout_at(max(start, self.moved) + limit_s):
                    await asyncio.shield(call.answer)
            except TimeoutError as error:
                if clock.monotonic() >= max(start, self.moved) + limit_s:
                    raise self._silent(limit_s) from error
        return call.answer.result()

    # ------------------------------------------------------------ shared memory

    async def share(self, limit_s: float) -> None:
        """Let each side read the other's memory from now on. Raises what stands against it; the stream goes
        on without."""
        peer = peer_of(self.transport and self.transport.get_extra_info("socket"))
        offers = await self._offer(Offers(), limit_s)
        if self.usable:  # else nothing would unmap it
            self.memory.begin(peer, offers)

    async def refer(self, call: _Call, payload: memoryview, limit_s: float) -> Place | None:
        """How the pserver finds a payload, which is lent to it until the call is answered; None: it has to be
        sent."""
        home = self.memory.home_of(payload)
        if home is None:
            return None
        region, offset = home
        if self._offering.locked() or self.memory.lender.number(region) is None:
            async with self._offering:
                if self.memory.home_of(payload) is None:  # refused meanwhile
                    return None
                try:
                    if self.memory.lender.number(region) is None:
                        await self._offer(self.memory.lender.offers((region,)), limit_s)
                except CallerError as error:
                    self.memory.lend_no_more(error)
                    return None
        number = self.memory.lender.number(region)
        assert number is not None
        call.lent.add(region)
        return number, offset, payload.nbytes

    async def _offer(self, offers: Offers, limit_s: float) -> Offers:
        """Both sides offer a memory once, and refuse it once. Cancelled when the answer has come already, the
        task would leave with it unread, and later blocks would refer to memory that one side does not know:
        so the connection is over, too."""
        with self.call("share", offers) as (_, call):
            try:
                return codec.read(Offers, await self.answered(call, limit_s))
            except asyncio.CancelledError:
                self.fail(PeerError(f"what {self._name} answered to an offer of memory was not read"))
                raise

    def _took(self, number: int, call: _Call, size: int) -> None:
        """A block was copied out of the pserver's memory, which may overwrite it once it hears that."""
        self.moved_bytes(size)
        if not call.took:
            asyncio.get_running_loop().call_soon(self._say_taken, number, call)
        call.took += 1

    def _say_taken(self, number: int, call: _Call) -> None:
        """A few at once, as long as more of them come. A connection that is over rests for ever, and there is
        nobody to tell."""
        if not self.usable:
            return
        if self.rests and call.took < HEADS:
            asyncio.get_running_loop().call_soon(self._say_taken, number, call)
            return
        self.send_map({"id": number, "took": call.took})
        call.took = 0

    # ------------------------------------------------------------ the end

    async def close(self) -> None:
        """At once; nothing of the connection is left when this returns."""
        self.abort()
        async with asyncio.timeout(CLOSE_S):
            await self._lost.wait()

    # ------------------------------------------------------------ FrameStream

    def prepare(self, header: codec.Fields) -> tuple[int, PulledBlock | LookupIds, Place | None]:
        number, at = header.pop("id", None), place_in(header)
        if not isinstance(number, int):
            raise BadFrame(
                f"{self._name} sent a block whose id is {number!r}: expected that of a pull or a lookup"
            )
        item = codec.read(LookupIds, header) if "lookup" in header else codec.read(PulledBlock, header)
        return number, item, at

    def place(
        self, header: tuple[int, PulledBlock | LookupIds, Place | None], size: int
    ) -> memoryview | None:
        number, item, at = header
        call = self.calls.get(number)
        if isinstance(item, LookupIds):
            lent = self.memory.payload(at, size) if at is not None else None
            size = size if lent is None else lent.nbytes
            if call is None or size > MOST_BYTES:
                raise BadFrame(f"{self._name} sent {size} bytes of rows that were not asked for")
            self._into = None
            call.rows = memoryview(bytearray(size if lent is None else lent))
            if lent is None:
                return call.rows
            self._took(number, call, size)
            return NOTHING
        if call is None or call.sink is None:
            raise BadFrame(f"{self._name} sent a block that was not asked for")
        lent = self.memory.payload(at, size) if at is not None else None
        size = size if lent is None else lent.nbytes
        try:
            memory = call.sink(item).cast("B")
        except Exception as error:
            self._answer(call, error)
            raise BadFrame(f"there is no place for block {item.block}: {error}") from error
        if memory.nbytes != size:
            refused = BadFrame(
                f"{self._name} sent {size} bytes for block {item.block}, whose place has {memory.nbytes}"
            )
            self._answer(call, refused)
            raise refused
        self._into, self._item = call, item
        if item.same:
            self.moved_bytes(HEAD_COST_BYTES)  # the block is copied here
        if lent is None:
            return memory
        memory[:] = lent
        self._took(number, call, size)
        return NOTHING

    def on_block(self, payload: memoryview) -> None:  # noqa: ARG002
        if self._into is None:
            return  # rows of a lookup
        assert self._item is not None
        if self._into.placed is not None:
            try:
                self._into.placed(self._item)
            except Exception as error:
                self._answer(self._into, error)
                raise BadFrame(f"nobody took block {self._item.block}: {error}") from error

    def on_map(self, fields: codec.Fields) -> None:
        error = fields.get("error")
        number = fields.get("id")
        if number is None and "offers" in fields:
            self.memory.learn(codec.read(Offers, fields))
            return
        if isinstance(error, dict) and number is None:
            raise from_map(error)
        call = self.calls.get(number) if isinstance(number, int) else None
        if call is None or call.answer.done():
            return  # the answer to a call that was refused before
        if isinstance(error, dict):
            self._answer(call, from_map(error))
        elif fields.get("end") is True and isinstance(message := fields.get("message"), dict):
            call.answer.set_result(message)
        else:
            raise BadFrame(f"{self._name} sent a map that is neither an end nor an error")

    def on_writable(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._lost.set()

    def on_over(self, error: TriremeError | None) -> None:
        why = error or PeerError(f"{self._name} closed the stream")
        for call in self.calls.values():
            if not call.answer.done() or call.answer.cancelled():
                for region in call.lent:
                    region.lost = True  # it may still be read there, as what it is now
            self._answer(call, why)
        self.memory.close()
        self.on_writable()

    # ------------------------------------------------------------ parts

    def fail(self, error: TriremeError) -> None:
        """The pserver needs no reason: it hears that we are gone."""
        if self.failure is None and not self.closed:
            self.failure = error
            self.abort()
            self.on_over(error)

    @staticmethod
    def _answer(call: _Call, error: Exception) -> None:
        if not call.answer.done():
            call.answer.set_exception(error)

    def _silent(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._name}: nothing moved on the stream for {seconds:g} s", silent_s=seconds
        )


class StreamPserver(HttpPserver):
    """A PserverPort: pushes, pulls and lookups on the stream, over the UNIX socket if the member is on this
    host, else TCP; the rest as plain requests. Close it (`async with`).

    `share`: over a UNIX socket, each side reads payloads where the other has them, if both can."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = 30.0,
        share: bool = True,
    ) -> None:
        super().__init__(member, token, tls=tls, stall_s=stall_s)
        self.stream: TrainerStream | None = None
        self._connecting = asyncio.Lock()
        # when the last attempt to connect failed, and why
        self._failed: tuple[float, PeerError] | None = None
        self._share = share

    def __repr__(self) -> str:
        return f"<StreamPserver {self.member.name} at {self.member.url}: {self.stream!r}>"

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.close()
        await super().close()

    async def push(
        self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]
    ) -> PushAnswer:
        """Payloads must stay unchanged until this returns."""
        stream = await self._connected()
        with stream.call("push", header) as (number, call):
            try:
                # an answer before the end is a refusal: send no more
                async with leave_when_done(call.answer):
                    async for item, payload in blocks:
                        view = memoryview(payload).cast("B")
                        await stream.taken(self._stall_s)
                        at = await stream.refer(call, view, self._stall_s)
                        size = 0 if at else view.nbytes
                        head = head_of(number, item.block, item.lanes, item.count, item.dtype, size, at)
                        if item.result is not None or item.rows is not None or item.version is not None:
                            fields = fields_of(number, item) | ({"at": at} if at else {})
                            head = codec.encode_block(fields, size)
                        if at:
                            stream.send_head(head)
                        else:
                            stream.send(head, view)
                        await stream.taken(self._stall_s)
            except BaseException:
                # refused: over there it is open until its end, and its number is used again
                if call.answer.done():
                    stream.send_map({"id": number, "end": True})
                raise
            stream.send_map({"id": number, "end": True})
            return codec.read(PushAnswer, await stream.answered(call, self._stall_s))

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        stream = await self._connected()
        with stream.call("pull", request, sink, placed) as (_, call):
            return codec.read(PullEnd, await stream.answered(call, self._stall_s + waits_s(request)))

    async def lookup(self, request: LookupRequest, ids: memoryview) -> tuple[LookupEnd, memoryview]:
        stream = await self._connected()
        with stream.call("lookup", request) as (number, call):
            await stream.taken(self._stall_s)
            if ids.nbytes:
                stream.send(codec.encode_block({"id": number, "lookup": True}, ids.nbytes), ids)
            await stream.taken(self._stall_s)
            stream.send_map({"id": number, "end": True})
            end = codec.read(LookupEnd, await stream.answered(call, self._stall_s + request.wait_s))
            return end, call.rows

    async def _connected(self) -> TrainerStream:
        """Raises PeerError: an attempt that failed counts for all calls that waited for it."""
        began = clock.monotonic()
        async with self._connecting:
            if self._failed is not None and self._failed[0] > began:
                raise self._failed[1].with_traceback(None)
            if self.stream is None or not self.stream.usable:
                self.stream = await self._opened()
            if self._share and not self.stream.memory.on:
                await self._try_to_share(self.stream)
                if not self.stream.usable:  # it was given up, since what it was told cannot be taken back
                    self.stream = await self._opened()
            return self.stream

    async def _opened(self) -> TrainerStream:
        uds = socket_of(self.member)
        try:
            try:
                stream = await self._upgraded(uds)
            except (AnotherProcess, NotReached) as error:
                if not uds:
                    raise
                # it was deleted or replaced; the process may serve at its address all the same
                log.info("unix_socket_left", pserver=self.member.name, uds=uds, cause=error.message)
                uds = ""
                stream = await self._upgraded(uds)
        except PeerError as error:
            if isinstance(error, UpgradeRefused):
                log.warning("upgrade_refused", pserver=self.member.name, cause=error.message)
            self._failed = clock.monotonic(), error
            raise
        unreadable = self.stream is not None and self.stream.memory.unreadable
        self._share = self._share and bool(uds) and not unreadable
        log.info("stream_open", pserver=self.member.name, over="unix" if uds else "tcp")
        return stream

    async def _upgraded(self, uds: str) -> TrainerStream:
        member, name = self.member, f"{self.member.name} at {self.member.url}"
        make, limit_s = partial(TrainerStream, name), min(CONNECT_S, self._stall_s)
        return await upgrade(
            member.url, make, member.incarnation, uds=uds, token=self._token, tls=self._tls, limit_s=limit_s
        )

    async def _try_to_share(self, stream: TrainerStream) -> None:
        """Not yet while the pserver has no parameters; never again once it is known that it cannot be."""
        try:
            await stream.share(self._stall_s)
        except NotReady:
            return
        except CallerError as error:
            self._share = False
            log.info("memory_not_shared", pserver=self.member.name, cause=error.message)
            if stream.memory.unreadable:
                await stream.close()
        else:
            log.info("memory_shared", pserver=self.member.name)


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def head_of(
    number: int, block: int, lanes: Interval, samples: int, dtype: str | None, size: int, at: Place | None
) -> bytes:
    """What precedes a pushed block; the same in every step."""
    fields: codec.Fields = {"id": number, "block": block, "lanes": lanes, "count": samples}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


def fields_of(number: int, item: PushBlock) -> codec.Fields:
    """Of a block with a result or a version, or of rows: every field that is not None. Record.model_dump
    takes three times as long."""
    fields = {"id": number} | _given(item)
    return fields if item.result is None else fields | {"result": _given(item.result)}


def _given(record: Record) -> codec.Fields:
    return {name: value for name, value in vars(record).items() if value is not None}


@asynccontextmanager
async def leave_when_done(future: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Run the block, but leave it as soon as `future` is done, wherever the block waits."""
    inside = True
    try:
        async with asyncio.timeout(None) as limit:

            def leave(_: object) -> None:
                if inside:
                    limit.reschedule(clock.monotonic())

            future.add_done_callback(leave)
            try:
                yield
            finally:
                inside = False
                future.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise


def waits_s(request: PullRequest) -> float:
    """How long the pserver may wait before it sends the first block: a pull of what is there does not
    wait."""
    return 0.0 if request.version is None else request.wait_s


class Connections(AbstractAsyncContextManager["Connections"]):
    """A port to each incarnation of each pserver, opened when first asked for; in collective jobs, of the
    other trainers."""

    def __init__(self, settings: Settings, stall_s: float) -> None:
        self._settings, self._stall_s = settings, stall_s
        self._tls = settings.tls.client()
        self._open: dict[str, StreamPserver] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *_: object) -> None:
        self.keep(())
        if self._closing:
            await asyncio.wait(self._closing)

    def keep(self, incarnations: Collection[str]) -> None:
        """Close the ports to all others: calls in flight fail at once."""
        for incarnation in [each for each in self._open if each not in incarnations]:
            closing = asyncio.get_running_loop().create_task(self._open.pop(incarnation).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def follow(self, directory: Directory) -> None:
        """Close the ports to parameter servers that are gone for good: another process has its place, or its
        place has no slots any more. One that is only not registered may come back."""
        there, slots = directory.pservers, directory.slots

        def stays(member: PserverMember) -> bool:
            if (known := there.get(member.index)) is not None:
                return known.incarnation == member.incarnation
            return slots is None or member.index in slots.owners

        self.keep([incarnation for incarnation, port in self._open.items() if stays(port.member)])

    def __call__(self, member: PserverMember) -> PserverPort:
        if member.incarnation not in self._open:
            self._open[member.incarnation] = self._port(member)
        return self._open[member.incarnation]

    def _port(self, member: PserverMember) -> StreamPserver:
        token, stall_s, transport = self._settings.own_token, self._stall_s, self._settings.transport
        if transport == "tcp":
            member = member.with_fields(uds="")
        elif transport != "auto" and not socket_of(member):
            raise InvalidArgument(
                f"TRIREME_TRANSPORT is {transport}, but {member.name} on {member.host} has no UNIX "
                "socket that is open "
                f"to this process on {socket.gethostname()}",
                hint="use auto, or give the parameter server a TRIREME_UDS that both can reach",
            )
        return StreamPserver(
            member, token, tls=self._tls, stall_s=stall_s, share=transport in {"auto", "shm"}
        )
