"""The pserver's end of upgraded streams (shared/trireme_shared/serving/transport/stream.py): frames go
directly to a Pserver, without a task per call.

push block: kernel -> receive buffer, or the trainer's memory -> applied
    -> sent to the pulls that wait for it, from the cache
pull block: values retained -> transport -> released when the kernel has them
                            or lent -> released when the trainer took them
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from aiohttp import web

from trireme_shared.blocks.buffers import Buffer
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security.access import Access, Asked
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import (
    BadFrame,
    DeadlineExceeded,
    PeerError,
    TooLarge,
    TriremeError,
)
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import (
    LookupEnd,
    LookupIds,
    LookupRequest,
    PullEnd,
    PullRequest,
    PushBlock,
    PushHeader,
)
from trireme_shared.serving.block_server import LENT_S, BlockServer
from trireme_shared.serving.core.calls import OpenPull, OpenPush
from trireme_shared.serving.data_plane.lookups import StreamLookups
from trireme_shared.serving.transport.shared_memory import (
    NOTHING,
    AnswerMemory,
    Offers,
    Place,
    ServerMemory,
    peer_of,
    place_in,
)
from trireme_shared.serving.transport.stream import BURST_BYTES, HEAD_COST_BYTES, PATH, UPGRADE, FrameStream
from trireme_shared.tables.payload import MOST_BYTES

HEADER_BYTES = 16 << 20  # of a pull that names its blocks
MAX_CALLS = 64  # open at once on one connection
MAX_AHEAD = 4096  # references read on one connection whose payloads are not applied yet
UNUSED_S = 3600.0  # for a connection without a call: trainers keep it open while they compute

log = telemetry.logger("pserver.stream")
PSERVER = web.AppKey("pserver", BlockServer)
ACCESS = web.AppKey("access", Access)


@dataclass(slots=True)
class _Push:
    """A push that is open on a stream."""

    number: int
    #: None: it is refused, and its blocks are skipped
    pushing: OpenPush | None = None
    #: where the next block is received
    memory: Buffer | None = None
    #: how many blocks it may still bring
    blocks_left: int = 0
    #: how many of its blocks are not applied yet
    ahead: int = 0
    #: no more blocks will come
    ended: bool = False
    #: copies soon what waits in the sender's memory
    keeping: asyncio.Handle | None = None

    def close(self) -> None:
        if self.memory is not None:
            self.memory.release()
            self.memory = None
        if self.pushing is not None:
            self.pushing.close()
        if self.keeping is not None:
            self.keeping.cancel()


@dataclass(slots=True)
class _Pull:
    """A pull that is open on a stream."""

    pulling: OpenPull
    expiry: asyncio.TimerHandle
    queued: bool = True
    expired: bool = False


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def _head_of(number: int, block: int, dtype: str | None, size: int, at: Place | None = None) -> bytes:
    """The header of a block that a pull gets. It is the same in every step, so it is made once."""
    fields: codec.Fields = {"id": number, "block": block}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def _same_of(number: int, block: int) -> bytes:
    """All of a block that a pull need not get again."""
    return codec.encode_block({"id": number, "block": block, "same": True}, 0)


class RoundRobin:
    """Calls what was asked for in order, one call in each turn of the event loop. Work that is not finished
    asks again."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<RoundRobin: {len(self._waiting)} wait>"

    def ask(self, work: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(work)

    def _next(self) -> None:
        work = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        work()


class PserverStream(FrameStream):
    """`turns`, `answers`: of all streams of the pserver. `stall_s`, `idle_s`: see TimeLimits in http.py.
    `over` is called when the connection is lost. `check_token` is called now and then; it raises TriremeError
    once the peer's token was revoked."""

    def __init__(
        self,
        pserver: BlockServer,
        turns: RoundRobin,
        answers: AnswerMemory,
        stall_s: float,
        idle_s: float,
        over: Callable[[], None],
        check_token: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(codec.Limits(payload_bytes=1 << 32, blocks=0, header_bytes=HEADER_BYTES))
        self._pserver, self._turns, self._lost = pserver, turns, over
        self._stall_s, self._idle_s = stall_s, idle_s
        self._check_token = check_token
        self._pushes: dict[int, _Push] = {}
        self._pulls: dict[int, _Pull] = {}
        self._due: deque[int] = deque()  # pulls that have something to send
        self._sent: list[Buffer] = []  # values the transport may still refer to
        self._item: PushBlock | None = None
        self._push: _Push | None = None  # the push whose payload is being read
        self._referred: memoryview | None = None  # its payload, if it lies in the trainer's memory
        # such payloads that are not applied yet
        self._ahead: deque[tuple[_Push, PushBlock, memoryview]] = deque()
        self._lookups = StreamLookups(pserver, self._send_rows, self._refuse, lambda: self._is_writable)
        self._memory = ServerMemory(
            lambda: peer_of(self.transport and self.transport.get_extra_info("socket")), answers
        )
        self._watchdog = asyncio.get_running_loop().call_later(stall_s / 2, self._watch)

    def __repr__(self) -> str:
        return (
            f"<PserverStream: {len(self._pushes)} pushes, {len(self._pulls)} pulls, "
            f"{'paused' if self.paused else 'writable'}>"
        )

    # ------------------------------------------------------------ in

    def prepare(self, header: codec.Fields) -> tuple[int, PushBlock | LookupIds, Place | None]:
        number = header.pop("id", None)
        at = place_in(header)
        if not isinstance(number, int):
            msg = f"a block whose id is {number!r}: expected that of a push or a lookup"
            raise BadFrame(msg)
        item = codec.read(LookupIds, header) if "lookup" in header else codec.read(PushBlock, header)
        return number, item, at

    def place(self, header: tuple[int, PushBlock | LookupIds, Place | None], size: int) -> memoryview | None:
        number, item, at = header
        if isinstance(item, LookupIds):
            self._item = None
            return self._lookups.place(number, size) if number in self._lookups else None
        self._item = item
        push = self._push = self._pushes.get(number)
        if push is None or push.ended:
            msg = "a block that belongs to no push: send the push's header first"
            raise BadFrame(msg)
        if push.pushing is None or push.memory is None:
            return None
        most = push.pushing.most_bytes(item, push.memory.view.nbytes)
        referred = self._memory.payload(at, size) if at is not None else None
        size = size if referred is None else referred.nbytes
        if size > most or not push.blocks_left:
            msg = f"a payload of {size} bytes with {push.blocks_left} blocks left: at most {most} bytes each"
            raise TooLarge(msg)
        push.blocks_left -= 1
        if referred is not None:
            self._referred = referred
            return NOTHING
        return self._pserver.payloads.take(size) if item.block == ROWS else push.memory.view[:size]

    def on_block(self, payload: memoryview) -> None:
        if self._item is None:
            return  # the ids of a lookup
        push, item = self._push, self._item
        assert push is not None
        assert push.pushing is not None
        assert push.memory is not None
        assert item is not None
        # rows come behind the block that tells the step's result
        if self._referred is not None or item.block == ROWS:
            push.pushing.learn(item)
            self.apply_later(push, item, payload if self._referred is None else self._referred)
            self._referred = None
            return
        push.pushing.apply(item, payload, push.memory)
        if push.memory.references > 1:  # it waits in the tree, so the next block is received elsewhere
            push.memory = push.memory.replaced()

    def on_map(self, fields: codec.Fields) -> None:
        number, message = fields.get("id"), fields.get("message")
        if not isinstance(number, int) or not 0 <= number < 1 << 32:
            msg = f"id is {number!r}: expected a number of 32 bits"
            raise BadFrame(msg)
        if fields.get("end") is True and number in self._pushes:
            self._end_push(self._pushes[number])
            return
        if fields.get("end") is True and number in self._lookups:
            self._lookups.end(number)
            return
        if "took" in fields:
            self._on_taken(number, fields["took"])
            return
        if (
            number in self._pushes
            or number in self._pulls
            or number in self._lookups
            or not isinstance(message, dict)
        ):
            msg = f"call {number} is open already, or its message is no map"
            raise BadFrame(msg)
        if len(self._pushes) + len(self._pulls) + len(self._lookups) >= MAX_CALLS:
            msg = f"more than {MAX_CALLS} calls at once: await their answers"
            raise TooLarge(msg)
        match fields.get("call"):
            case "push":
                self._begin_push(number, codec.read(PushHeader, message))
            case "pull":
                self._begin_pull(number, codec.read(PullRequest, message))
            case "lookup":
                self._lookups.begin(number, codec.read(LookupRequest, message))
            case "share":
                self._share(number, message)
            case other:
                msg = (
                    f"call {other!r}: expected 'push', 'pull', 'lookup' or 'share'; the rest are plain "
                    "requests"
                )
                raise BadFrame(msg)

    def _send_rows(self, number: int, rows: memoryview | None, end: LookupEnd) -> None:
        if rows is not None:
            head, lent = {"id": number, "lookup": True}, self._memory.lend_rows(number, rows)
            if lent is None:
                self.send(codec.encode_block(head, rows.nbytes), rows)
            else:
                self._refer(lent[0], codec.encode_block({**head, "at": lent[1]}, 0))
        self.send_map({"id": number, "end": True, "message": codec.plain(end)})

    def _refer(self, offers: Offers, head: bytes) -> None:
        if offers.offers:
            self.send_map(codec.plain(offers))
        self.send_head(head)

    def _begin_push(self, number: int, header: PushHeader) -> None:
        push = self._pushes[number] = _Push(number)
        try:
            push.memory, push.blocks_left = self._pserver.memory_for(header)
            push.pushing = self._pserver.begin_push(
                header, lambda: self._end_push(push) if push.ended else None
            )
        except TriremeError as error:
            push.close()
            self._refuse(number, error)

    def _end_push(self, push: _Push) -> None:
        push.ended = True
        if push.ahead or self._pushes.get(push.number) is not push:
            return
        if push.pushing is not None and push.pushing.waiting:
            if push.keeping is None:
                push.keeping = asyncio.get_running_loop().call_later(LENT_S, self._keep, push, push.pushing)
            return
        del self._pushes[push.number]
        push.close()
        if push.pushing is not None:
            try:
                self.send_map({"id": push.number, "end": True, "message": codec.plain(push.pushing.answer())})
            except TriremeError as error:
                self._refuse(push.number, error)

    def _keep(self, push: _Push, pushing: OpenPush) -> None:
        """Copy what waits in the trainer's memory; the push is answered behind the last of it."""
        if pushing.keep_some(BURST_BYTES):
            push.keeping = asyncio.get_running_loop().call_soon(self._keep, push, pushing)

    def _begin_pull(self, number: int, request: PullRequest) -> None:
        try:
            pulling = self._pserver.begin_pull(request, lambda: self._arrived(number))
        except TriremeError as error:
            self._refuse(number, error)
            return
        if isinstance(pulling, PullEnd):
            self.send_map({"id": number, "end": True, "message": codec.plain(pulling)})
            return
        wait_s = pulling.deadline - clock.monotonic()
        expiry = asyncio.get_running_loop().call_later(wait_s, self._expired, number)
        self._pulls[number] = _Pull(pulling, expiry)
        self._due.append(number)
        self.on_writable()

    # ------------------------------------------------------------ shared memory

    def apply_later(self, push: _Push, item: PushBlock, payload: memoryview) -> None:
        """References are read ahead of applying their blocks, so the frames behind them are read in time."""
        if not self._ahead:
            self._turns.ask(self._apply_some)
        elif len(self._ahead) >= MAX_AHEAD:
            self._apply_next()
        push.ahead += 1
        self._ahead.append((push, item, payload))
        self.moved_bytes(HEAD_COST_BYTES)

    def _apply_some(self) -> None:
        """Apply blocks for one turn; then the event loop and the other streams have theirs."""
        done = 0
        try:
            while self._ahead and done < BURST_BYTES:
                done += self._apply_next()
        except TriremeError as error:
            self.fail(error)
        except Exception:
            self.abort()  # as a transport does when its protocol raises: the trainer notices at once
            raise
        if self._ahead:
            self._turns.ask(self._apply_some)

    def _apply_next(self) -> int:
        """Returns the size of the block in bytes."""
        push, item, payload = self._ahead.popleft()
        push.ahead -= 1
        assert push.pushing is not None
        push.pushing.apply(item, payload)
        if push.ended:
            self._end_push(push)
        return payload.nbytes

    def _share(self, number: int, message: codec.Fields) -> None:
        try:
            store = self._pserver.loaded()
            most = max(store.layout.vector_bytes, MOST_BYTES if store.rows is not None else 0)
            offers = self._memory.share(codec.read(Offers, message), store.homes(), most)
        except TriremeError as error:
            self._refuse(number, error)
        else:
            self.send_map({"id": number, "end": True, "message": codec.plain(offers)})

    def _on_taken(self, number: int, count: object) -> None:
        self._memory.took(number, count)
        self.on_writable()

    def _refuse(self, number: int, error: TriremeError) -> None:
        self.send_map({"id": number, "error": error.to_map()})

    # ------------------------------------------------------------ out

    @property
    def _is_writable(self) -> bool:
        return not (self.paused or self.rests or self.closed or self.failure is not None)

    @property
    def _may_send(self) -> bool:
        return self._is_writable and not self._memory.full

    def on_writable(self) -> None:
        """Send rows, and blocks, until the transport is full; the pulls take turns."""
        self._release()
        self._lookups.on_writable()
        while self._due and self._may_send:
            number = self._due.popleft()
            pull = self._pulls[number]
            found = pull.pulling.next()
            if found is None and pull.expired:
                self._end_pull(number, pull.pulling.too_early())
            elif found is None:
                pull.queued = False
            elif isinstance(found, PullEnd):
                self._end_pull(number, found)
            else:
                self._due.append(number)
                block, _, buffer = found
                if buffer is None:
                    self.send_head(_same_of(number, block))
                    continue
                size, dtype = buffer.view.nbytes, pull.pulling.narrow(block)
                lent = self._memory.lend(number, buffer)
                if lent is None:
                    self._sent.append(buffer)
                    self.send(_head_of(number, block, dtype, size), buffer.view)
                    self._release()
                else:
                    self._refer(lent[0], _head_of(number, block, dtype, 0, lent[1]))

    def _arrived(self, number: int) -> None:
        """A block that a pull waits for has its version (called in the middle of a push)."""
        pull = self._pulls[number]
        if not pull.queued:
            pull.queued = True
            self._due.append(number)
        if not self.paused:
            self.on_writable()

    def _expired(self, number: int) -> None:
        pull = self._pulls[number]
        pull.expired = True
        if not pull.queued:
            self._end_pull(number, pull.pulling.too_early())

    def _end_pull(self, number: int, end: PullEnd) -> None:
        """Blocks that were lent to the pull stay lent until the trainer says that it took them."""
        pull = self._pulls.pop(number)
        pull.expiry.cancel()
        pull.pulling.close()
        self.send_map({"id": number, "end": True, "message": codec.plain(end)})

    def _release(self) -> None:
        """Release values that the transport does not refer to any more."""
        if self._sent and (not self.paused or self.closed):
            for buffer in self._sent:
                buffer.release()
            self._sent.clear()

    # ------------------------------------------------------------ the end

    def _watch(self) -> None:
        """End the connection if the peer makes no progress for too long, or may not use it any more."""
        try:
            self._check_token()
        except TriremeError as error:  # it may have a new token by now
            self.fail(
                PeerError(f"the token of this stream is not taken any more ({error.message}); connect again")
            )
            self.abort()
            return
        since = self.moved
        if self.paused:
            since, limit, what = self.paused_at, self._stall_s, "the peer took no byte"
        elif self._memory.lends:
            since, limit, what = self._memory.moved, self._stall_s, "the peer took no block that it was lent"
        elif not self._decoder.between_blocks:
            limit, what = self._stall_s, "no byte of a frame came"
        elif self._pushes:
            limit, what = self._idle_s, "no block of a push came"
        else:
            limit, what = UNUSED_S, "the stream was not used"
        if clock.monotonic() - since >= limit:
            paused = self.paused
            self.fail(DeadlineExceeded(f"{what} for {limit:g} s; connect again"))
            if paused:
                self.abort()
            return
        self._watchdog = asyncio.get_running_loop().call_later(min(limit, self._stall_s) / 2, self._watch)

    def on_over(self, error: TriremeError | None) -> None:
        self._watchdog.cancel()
        self._lookups.close()
        self._memory.close()
        self._ahead.clear()
        self._push = self._referred = None
        for push in self._pushes.values():
            push.close()
        for pull in self._pulls.values():
            pull.expiry.cancel()
            pull.pulling.close()
        if error is not None and (self._pushes or self._pulls):
            log.info("stream_broken", cause=error.message, stream=repr(self))
        self._pushes.clear()
        self._pulls.clear()
        self._due.clear()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._release()
        self._lost()


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a peer may send nothing: inside a message (`stall_s`), and between two blocks, while it
    computes (`idle_s`)."""

    stall_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams that are open, their turns to work, and what they lend of lookups."""

    open: set[PserverStream] = field(default_factory=set)
    turns: RoundRobin = field(default_factory=RoundRobin)
    answers: AnswerMemory = field(default_factory=AnswerMemory)


STREAMS = web.AppKey("streams", Streams)


TIME_LIMITS = web.AppKey("time_limits", TimeLimits)


async def take_upgrade(request: web.Request) -> web.StreamResponse:
    """Hand the connection over to a PserverStream and wait for its end."""
    if request.headers.get("Upgrade", "").lower() != UPGRADE:
        msg = f"{PATH} needs the header 'Upgrade: {UPGRADE}', not {request.headers.get('Upgrade', '')[:40]!r}"
        return web.Response(
            body=codec.encode(BadFrame(msg).to_map()), status=426, headers={"Upgrade": UPGRADE}
        )
    response = web.StreamResponse(status=101, headers={"Upgrade": UPGRADE, "Connection": "Upgrade"})
    await response.prepare(request)
    transport, handler = request.transport, request.protocol
    if transport is None:
        return response
    over = asyncio.get_running_loop().create_future()

    def lost() -> None:
        handler.connection_lost(None)  # aiohttp forgets the connection
        if not over.done():
            over.set_result(None)

    access, asked = request.app[ACCESS], asked_of(request)

    def check_token() -> None:
        access.admit(asked, Role.MEMBER)

    limits, streams = request.app[TIME_LIMITS], request.app[STREAMS]
    upgraded = PserverStream(
        request.app[PSERVER], streams.turns, streams.answers, limits.stall_s, limits.idle_s, lost, check_token
    )
    upgraded.take_over(transport)
    streams.open.add(upgraded)
    try:
        await over
    finally:
        streams.open.discard(upgraded)
        upgraded.abort()
    return response


def asked_of(request: web.Request) -> Asked:
    """Take it while the connection is open: it has the address."""
    ends = (request.get_extra_info("sockname"), request.get_extra_info("peername"))
    return Asked.of(request.method, request.headers, *ends)


async def close_streams(app: web.Application) -> None:
    for upgraded in tuple(app[STREAMS].open):
        upgraded.abort()
