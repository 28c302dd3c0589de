"""The trainer's end of one upgraded connection (shared/trireme_shared/serving/transport/stream.py): its calls in flight, by id, and the memory that both ends share.

call ─► frames ─► answered       given up before its answer, or what came with an answer is lost ─► the connection is over
trainer --its gradient vectors, read only--> pserver --the blocks' memory, read only--> trainer
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from trainer_agent.data_plane.http import Placed, Sink
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import BadFrame, CallerError, DeadlineExceeded, PeerError, TriremeError, from_map
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import LookupIds, PulledBlock
from trireme_shared.serving.transport.shared_memory import (
    ALIGNMENT_BYTES,
    NOTHING,
    Borrower,
    Lender,
    Offers,
    Place,
    Region,
    peer_of,
    place_in,
    place_of,
)
from trireme_shared.serving.transport.stream import HEAD_COST_BYTES, HEADS, FrameStream
from trireme_shared.tables.payload import MOST_BYTES

CLOSE_S = 2.0
log = telemetry.logger("trainer_memory")


class _Call:
    """One request in flight; `answer` is its last frame. `lent`: the regions that the pserver may read for it."""

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
        self._offering = asyncio.Lock()  # nothing refers to a region before it is known whether the peer reads it

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
        number = next(number for number in count(1) if number not in self.calls)  # few numbers: headers come again
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
        """Wait until the transport refers to nothing that was sent, and it is the stream's turn. Raises DeadlineExceeded, and why the stream is over."""
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

    # ------------------------------------------------------------ shared memory

    async def share(self, limit_s: float) -> None:
        """Let each side read the other's memory from now on. Raises what stands against it; the stream goes on without."""
        peer = peer_of(self.transport and self.transport.get_extra_info("socket"))
        offers = await self._offer(Offers(), limit_s)
        if self.usable:  # else nothing would unmap it
            self.memory.begin(peer, offers)

    async def refer(self, call: _Call, payload: memoryview, limit_s: float) -> Place | None:
        """How the pserver finds a payload, which is lent to it until the call is answered; None: it has to be sent."""
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
        """Both sides offer a memory once, and refuse it once. Cancelled when the answer has come already, the task would leave with it unread, and later blocks
        would refer to memory that one side does not know: so the connection is over, too."""
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
        """A few at once, as long as more of them come. A connection that is over rests for ever, and there is nobody to tell."""
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
            raise BadFrame(f"{self._name} sent a block whose id is {number!r}: expected that of a pull or a lookup")
        item = codec.read(LookupIds, header) if "lookup" in header else codec.read(PulledBlock, header)
        return number, item, at

    def place(self, header: tuple[int, PulledBlock | LookupIds, Place | None], size: int) -> memoryview | None:
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
        return DeadlineExceeded(f"{self._name}: nothing moved on the stream for {seconds:g} s", silent_s=seconds)


class TrainerMemory:
    """The shared memory of one connection: gradients are read where they lie, parameters are copied from where they are. `on`: each end reads
    the other's memory. `unreadable`: we cannot map what the pserver offers."""

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
        """The pserver, process `peer`, agreed. Raises InvalidArgument, TooLarge: its memory cannot be mapped."""
        borrower = Borrower(peer)
        self._learn(borrower, offers)
        self._borrower, self._lends = borrower, True

    def learn(self, offers: Offers) -> None:
        """Raises as `begin`, BadFrame before it."""
        self._learn(self._known(), offers)

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a pulled block refers to, which has `sent` bytes of its own. Raises BadFrame, InvalidArgument."""
        return self._known().payload(place, sent)

    def close(self) -> None:
        """The connection is over: the peer's memory is unmapped at once, not when the interpreter finds what refers to the connection. Each mapping has a
        descriptor, and keeps the memory of a peer that has ended."""
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
