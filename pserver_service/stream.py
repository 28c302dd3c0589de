"""The pserver's end of upgraded streams (shared/stream.py): frames straight into a Pserver, without a task per call.

push block: kernel -> receive buffer -> applied -> pulls that wait for it are served, while it is in the cache
pull block: values retained -> transport -> released when the kernel has them
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from pserver_service.calls import Pulling, Pushing
from pserver_service.core.buffers import Buffer
from pserver_service.service import Pserver
from shared import clock, telemetry, wire
from shared.errors import BadFrame, DeadlineExceeded, TooLarge, TriremeError
from shared.messages import PullEnd, PullRequest, PushBlock, PushHeader
from shared.stream import FrameStream

HEADER_BYTES = 16 << 20  # of a pull that names its blocks
MAX_CALLS = 64  # at once on one connection
UNUSED_S = 3600.0  # for a connection without a call: trainers keep theirs while they compute

log = telemetry.logger("pserver.stream")


@dataclass(slots=True)
class _Push:
    """`pushing` None: refused, the rest of it is skipped."""

    pushing: Pushing | None = None
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    blocks_left: int = 0
    held: ExitStack = field(default_factory=ExitStack)


@dataclass(slots=True)
class _Pull:
    pulling: Pulling
    expiry: asyncio.TimerHandle
    queued: bool = True
    expired: bool = False


class PserverStream(FrameStream):
    """`stall_s`, `idle_s`: see routes.frames.Patience. `over` is called when the connection is lost."""

    def __init__(self, pserver: Pserver, stall_s: float, idle_s: float, over: Callable[[], None]) -> None:
        super().__init__(wire.Limits(payload_bytes=1 << 32, blocks=0, header_bytes=HEADER_BYTES))
        self._pserver, self._stall_s, self._idle_s, self._lost = pserver, stall_s, idle_s, over
        self._pushes: dict[int, _Push] = {}
        self._pulls: dict[int, _Pull] = {}
        self._due: deque[int] = deque()  # pulls that have something to send
        self._sent: list[Buffer] = []  # values the transport may still refer to
        self._item: PushBlock | None = None
        self._pushing: Pushing | None = None
        self._watchdog = asyncio.get_running_loop().call_later(stall_s / 2, self._watch)

    def __repr__(self) -> str:
        return f"<PserverStream: {len(self._pushes)} pushes, {len(self._pulls)} pulls, {'paused' if self.paused else 'writable'}>"

    # ------------------------------------------------------------ in

    def place(self, header: wire.Fields, size: int) -> memoryview | None:
        push = self._pushes.get(header.pop("id", -1))
        if push is None:
            msg = "a block that belongs to no push: send the push's header first"
            raise BadFrame(msg)
        if push.pushing is None:
            return None
        if size > push.memory.nbytes or not push.blocks_left:
            msg = f"a payload of {size} bytes with {push.blocks_left} blocks left: at most {push.memory.nbytes} bytes each"
            raise TooLarge(msg)
        push.blocks_left -= 1
        self._item, self._pushing = wire.read(PushBlock, header), push.pushing
        return push.memory[:size]

    def on_block(self, payload: memoryview) -> None:
        assert self._pushing is not None
        assert self._item is not None
        self._pushing.apply(self._item, payload)

    def on_map(self, fields: wire.Fields) -> None:
        number, message = fields.get("id"), fields.get("message")
        if not isinstance(number, int) or not 0 <= number < 1 << 32:
            msg = f"id is {number!r}: expected a number of 32 bits"
            raise BadFrame(msg)
        if fields.get("end") is True and number in self._pushes:
            self._end_push(number)
            return
        if number in self._pushes or number in self._pulls or not isinstance(message, dict):
            msg = f"call {number} is open already, or its message is no map"
            raise BadFrame(msg)
        if len(self._pushes) + len(self._pulls) >= MAX_CALLS:
            msg = f"more than {MAX_CALLS} calls at once: await their answers"
            raise TooLarge(msg)
        match fields.get("call"):
            case "push":
                self._begin_push(number, wire.read(PushHeader, message))
            case "pull":
                self._begin_pull(number, wire.read(PullRequest, message))
            case other:
                msg = f"call {other!r}: expected 'push' or 'pull'; the rest are plain requests"
                raise BadFrame(msg)

    def _begin_push(self, number: int, header: PushHeader) -> None:
        push = self._pushes[number] = _Push()
        try:
            push.memory, push.blocks_left = push.held.enter_context(self._pserver.receiving(header))
            push.pushing = self._pserver.begin_push(header)
        except TriremeError as error:
            push.held.close()
            self._refuse(number, error)

    def _end_push(self, number: int) -> None:
        push = self._pushes.pop(number)
        push.held.close()
        if push.pushing is not None:
            self.send_map({"id": number, "end": True, "message": wire.plain(push.pushing.answer())})

    def _begin_pull(self, number: int, request: PullRequest) -> None:
        try:
            pulling = self._pserver.begin_pull(request, lambda: self._arrived(number))
        except TriremeError as error:
            self._refuse(number, error)
            return
        if isinstance(pulling, PullEnd):
            self.send_map({"id": number, "end": True, "message": wire.plain(pulling)})
            return
        wait_s = pulling.deadline - clock.monotonic()
        expiry = asyncio.get_running_loop().call_later(wait_s, self._expired, number)
        self._pulls[number] = _Pull(pulling, expiry)
        self._due.append(number)
        self.on_writable()

    def _refuse(self, number: int, error: TriremeError) -> None:
        self.send_map({"id": number, "error": error.to_map()})

    # ------------------------------------------------------------ out

    def on_writable(self) -> None:
        """Send what is there until the transport is full; pulls take turns."""
        self._release()
        while self._due and not self.paused and not self.closed and self.failure is None:
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
                block, version, buffer = found
                self._sent.append(buffer)
                size = buffer.view.nbytes
                self.send(wire.encode_block({"id": number, "block": block, "version": version}, size), buffer.view)
                self._release()

    def _arrived(self, number: int) -> None:
        """A block that a pull waits for is there (we are in the middle of somebody's push)."""
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
        pull = self._pulls.pop(number)
        pull.expiry.cancel()
        pull.pulling.close()
        self.send_map({"id": number, "end": True, "message": wire.plain(end)})

    def _release(self) -> None:
        """Give values back that the transport does not refer to any more."""
        if self._sent and (not self.paused or self.closed):
            for buffer in self._sent:
                buffer.release()
            self._sent.clear()

    # ------------------------------------------------------------ the end

    def _watch(self) -> None:
        """Nobody is waited for without a limit."""
        since = self.moved
        if self.paused:
            since, limit, what = self.paused_at, self._stall_s, "the peer took no byte"
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
        for push in self._pushes.values():
            push.held.close()
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
