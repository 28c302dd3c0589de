"""A PserverPort over an upgraded stream (shared/stream.py): one connection, pushes and pulls at the same time.

    none --first call--> connected --calls, by id--> ... --an error, a timeout, a cancelled call--> none, calls in flight fail

A call that does not come to its end takes the connection with it: no byte of it can arrive anywhere afterwards. The next
call connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Self

from shared import clock, telemetry, wire
from shared.errors import BadFrame, DeadlineExceeded, PeerError, TriremeError, from_map
from shared.messages import (
    InitBlock,
    InitHeader,
    LedgerAnswer,
    LedgerQuery,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
)
from shared.records import PserverMember, Record
from shared.stream import FrameStream
from shared.upgrade import UpgradeRefused, upgrade
from trainer_agent.pservers import HttpPserver, Placed, Sink, socket_of

CONNECT_S = 2.0

log = telemetry.logger("stream")


class _Call:
    """One request in flight; `answer` is its last frame."""

    def __init__(self, sink: Sink | None = None, placed: Placed | None = None) -> None:
        self.sink, self.placed = sink, placed
        self.answer: asyncio.Future[wire.Fields] = asyncio.get_running_loop().create_future()


class TrainerStream(FrameStream):
    """The trainer's end. `name`: of the peer, for messages."""

    def __init__(self, name: str) -> None:
        super().__init__(wire.Limits(payload_bytes=1 << 32, blocks=0, header_bytes=64 << 20))
        self._name = name
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._into: _Call | None = None
        self._item: PulledBlock | None = None

    def __repr__(self) -> str:
        return f"<TrainerStream to {self._name}: {len(self._calls)} calls>"

    @property
    def usable(self) -> bool:
        return not self.closed and self.failure is None

    @contextmanager
    def call(
        self, kind: str, message: Record, sink: Sink | None = None, placed: Placed | None = None
    ) -> Iterator[tuple[int, _Call]]:
        """Opens a request; leaving before its answer closes the connection."""
        self._number += 1
        number, call = self._number, _Call(sink, placed)
        self._calls[number] = call
        try:
            self.send_map({"id": number, "call": kind, "message": wire.plain(message)})
            yield number, call
        finally:
            self._calls.pop(number, None)
            if not call.answer.done() or call.answer.cancelled():
                self._drop(PeerError(f"a {kind} at {self._name} was given up"))
            elif call.answer.exception() is not None:
                pass  # marks it as seen

    async def taken(self, limit_s: float) -> None:
        """Wait until the transport refers to nothing that was sent. Raises DeadlineExceeded, and why the stream is over."""
        while self.paused and self.usable:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(self.paused_at + limit_s):
                    await waiter
            except TimeoutError as error:
                raise self._silent(limit_s) from error
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        if not self.usable:
            raise self.failure or PeerError(f"{self._name} closed the stream")

    async def answered(self, call: _Call, limit_s: float) -> wire.Fields:
        """The last frame. Raises the error it carries; DeadlineExceeded if nothing comes from the peer for `limit_s`."""
        start = clock.monotonic()
        while not call.answer.done():
            try:
                async with asyncio.timeout_at(max(start, self.moved) + limit_s):
                    await asyncio.shield(call.answer)
            except TimeoutError as error:
                if clock.monotonic() >= max(start, self.moved) + limit_s:
                    raise self._silent(limit_s) from error
        return call.answer.result()

    # ------------------------------------------------------------ FrameStream

    def place(self, header: wire.Fields, size: int) -> memoryview | None:
        call = self._calls.get(header.pop("id", -1))
        if call is None or call.sink is None:
            msg = f"{self._name} sent a block that was not asked for"
            raise BadFrame(msg)
        item = wire.read(PulledBlock, header)
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
        return memory

    def on_block(self, payload: memoryview) -> None:  # noqa: ARG002
        assert self._into is not None
        assert self._item is not None
        if self._into.placed is not None:
            try:
                self._into.placed(self._item)
            except Exception as error:
                self._answer(self._into, error)
                raise BadFrame(f"nobody took block {self._item.block}: {error}") from error

    def on_map(self, fields: wire.Fields) -> None:
        error = fields.get("error")
        number = fields.get("id")
        if isinstance(error, dict) and number is None:
            raise from_map(error)
        call = self._calls.get(number) if isinstance(number, int) else None
        if call is None or call.answer.done():
            return  # the answer to a call that was refused before
        if isinstance(error, dict):
            self._answer(call, from_map(error))
        elif fields.get("end") is True and isinstance(message := fields.get("message"), dict):
            call.answer.set_result(message)
        else:
            msg = f"{self._name} sent a map that is neither an end nor an error"
            raise BadFrame(msg)

    def on_writable(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def on_over(self, error: TriremeError | None) -> None:
        why = error or PeerError(f"{self._name} closed the stream")
        for call in self._calls.values():
            self._answer(call, why)
        self.on_writable()

    # ------------------------------------------------------------ parts

    def fail(self, error: TriremeError) -> None:
        """The pserver needs no reason: it hears that we are gone."""
        self._drop(error)

    def _drop(self, error: TriremeError) -> None:
        if self.failure is None and not self.closed:
            self.failure = error
            self.abort()
            self.on_over(error)

    @staticmethod
    def _answer(call: _Call, error: Exception) -> None:
        if not call.answer.done():
            call.answer.set_exception(error)

    def _silent(self, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._name}: nothing moved on the stream for {seconds:g} s")


@asynccontextmanager
async def _until(answer: asyncio.Future[wire.Fields]) -> AsyncIterator[None]:
    """Run the block, but leave it as soon as `answer` is there, wherever it waits."""
    inside = True
    try:
        async with asyncio.timeout(None) as limit:

            def leave(_: object) -> None:
                if inside:
                    limit.reschedule(clock.monotonic())

            answer.add_done_callback(leave)
            try:
                yield
            finally:
                inside = False
                answer.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise


class StreamPserver:
    """A PserverPort: pushes and pulls on the stream, over the UNIX socket if the member is on this host, else TCP; the rest,
    and everything if the pserver refuses to upgrade, as plain requests. Close it (`async with`)."""

    def __init__(self, member: PserverMember, token: str = "", *, stall_s: float = 30.0) -> None:
        self.member = member
        self.plain = HttpPserver(member, token, stall_s=stall_s)
        self._token, self._stall_s = token, stall_s
        self._stream: TrainerStream | None = None
        self._connecting = asyncio.Lock()
        self._refused = False

    def __repr__(self) -> str:
        return f"<StreamPserver {self.member.index} at {self.member.url}: {self._stream!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.abort()
        await self.plain.close()

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, memoryview]]) -> None:
        await self.plain.init(header, blocks)

    async def info(self) -> PserverInfo:
        return await self.plain.info()

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        return await self.plain.ledger(query)

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]) -> PushAnswer:
        stream = await self._connected()
        if stream is None:
            return await self.plain.push(header, blocks)
        with stream.call("push", header) as (number, call):
            async with _until(call.answer):  # an answer before the end is a refusal: send no more
                async for item, payload in blocks:
                    view = memoryview(payload).cast("B")
                    fields = {"id": number, "block": item.block, "lanes": item.lanes, "count": item.count}
                    await stream.taken(self._stall_s)
                    stream.send(wire.encode_block(fields, view.nbytes), view)
                    await stream.taken(self._stall_s)
            stream.send_map({"id": number, "end": True})
            return wire.read(PushAnswer, await stream.answered(call, self._stall_s))

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        stream = await self._connected()
        if stream is None:
            return await self.plain.pull(request, sink, placed)
        with stream.call("pull", request, sink, placed) as (_, call):
            return wire.read(PullEnd, await stream.answered(call, self._stall_s + request.wait_s))

    async def _connected(self) -> TrainerStream | None:
        """None: plain requests are what this pserver understands. Raises PeerError."""
        async with self._connecting:
            if self._stream is not None and self._stream.usable:
                return self._stream
            if self._refused:
                return None
            name = f"pserver {self.member.index} at {self.member.url}"
            try:
                self._stream = await self._upgraded(name)
            except UpgradeRefused as error:
                log.info("upgrade_refused", pserver=self.member.index, cause=error.message)
                self._refused = True
                return None
            return self._stream

    async def _upgraded(self, name: str) -> TrainerStream:
        make, limit_s = partial(TrainerStream, name), min(CONNECT_S, self._stall_s)
        return await upgrade(self.member.url, make, uds=socket_of(self.member), token=self._token, limit_s=limit_s)
