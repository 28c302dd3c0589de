"""One upgraded connection: frames in both directions at once, read into and written from their final memory
(see codec.py).

    GET /v1/stream, Upgrade: trireme-frames/1  --101-->  map | [map, bin] | map | ...
                                                         the same in both directions

    calls:    {"id": 3, "call": "push", "message": PushHeader}  [{"id": 3, ...PushBlock}, bin] ...
                                                                {"id": 3, "end": true}
              {"id": 4, "call": "pull", "message": PullRequest}
    answers:  [{"id": 4, ...PulledBlock}, bin] ...  {"id": n, "end": true, "message": ...}
              {"id": n, "error": {...}}: that request is refused;  without id: all requests end

On one host a block may refer to shared memory of its sender, which the receiver can only read
(shared/trireme_shared/serving/transport/shared_memory.py):

    {"id": 2, "call": "share", "message": {"offers": [Offer ...]}}
        answer, or at any time: {"offers": [Offer ...]}
    {"id": 3, ...PushBlock, "at": [memory, offset, size]}
        the pusher's memory, unchanged until the push is answered
    {"id": 4, ...PulledBlock, "at": ...}  answered by  {"id": 4, "took": 1}      unchanged until then

Frames of several requests may alternate. A malformed frame ends the connection with a typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.http import MEANT, Token, is_here, session, text_of
from trireme_shared.protocol.errors import (
    AnotherProcess,
    DeadlineExceeded,
    Forbidden,
    PeerError,
    TriremeError,
    Unauthorized,
)
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec

UPGRADE = "trireme-frames/1"
PATH = "/v1/stream"
# kernel buffers on one host: enough for one turn of each end, and small enough for the cache
LOCAL_BYTES = 2 << 20
HEAD_BYTES = 8 << 10  # read at once if no payload is expected; bytes of a payload in it are copied
HEADS = 4  # at most so many blocks without payload are sent at once
# read, sent or worked on before other tasks get their turn; with more, the two ends work one after the other
BURST_BYTES = 256 << 10
HEAD_COST_BYTES = 16 << 10  # a block without payload costs as much time as so many bytes
ANSWER_BYTES = 16 << 10  # of the head of an answer to an upgrade
LINGER_S = 2.0  # time for the peer to read why its connection is closed


class FrameStream(asyncio.BufferedProtocol):
    """Either end. A subclass says where payloads go (`place`, see codec.Decoder) and handles frames.

    Memory given to `send` must not change until `paused` is False: the transport refers to it.
    """

    def __init__(self, limits: codec.Limits) -> None:
        self.paused = False
        self.rests = False
        self.closed = False
        self.failure: TriremeError | None = None
        # time of the last received bytes; time when the transport was last full
        self.moved = self.paused_at = clock.monotonic()
        self.transport: asyncio.Transport | None = None
        self._decoder = codec.Decoder(limits, self.place, endless=True, prepare=self.prepare)
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._vacant = self._head  # where the next bytes go
        self._now = clock.reader()
        self._heads: list[bytes] = []  # not sent yet
        self._corked = False
        self._burst = 0  # bytes since other tasks had their turn in the event loop
        # events of received bytes; not finished while other tasks have their turn
        self._events: Iterator[codec.Event] = iter(())

    # ------------------------------------------------------------ for subclasses

    def prepare(self, header: codec.Fields) -> Any:
        """The argument of `place` for a block's header; may depend on the header alone. A TriremeError ends
        the connection."""
        raise NotImplementedError

    def place(self, header: Any, size: int) -> memoryview | None:
        """Memory for a block's payload; None skips the block. A TriremeError ends the connection."""
        raise NotImplementedError

    def on_map(self, fields: codec.Fields) -> None:
        """A TriremeError ends the connection."""
        raise NotImplementedError

    def on_block(self, payload: memoryview) -> None:
        """The block of the last `place` is complete, in the memory that it gave. A TriremeError ends the
        connection."""
        raise NotImplementedError

    def on_writable(self) -> None:
        """The transport has sent everything, or it is this stream's turn again. Do not send while it
        `rests`."""

    def moved_bytes(self, count: int) -> None:
        """`count` bytes were read, sent or worked on; after BURST_BYTES other tasks have their turn in the
        event loop."""
        self._burst += count
        if self._burst >= BURST_BYTES and not self.rests and self.transport is not None:
            self.rests = True
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def on_over(self, error: TriremeError | None) -> None:
        """Called once: no more frames will come (`error` None: the connection ended between two frames)."""

    # ------------------------------------------------------------ out

    def send(self, *parts: bytes | memoryview) -> None:
        if self.transport is not None and not self.closed and self.failure is None:
            self.transport.writelines((*self._heads, *parts) if self._heads else parts)
            self._heads.clear()
            self.moved_bytes(sum(map(len, parts)))

    def send_head(self, head: bytes) -> None:
        """A block without payload. The first is sent at once; those that follow in the same turn of the loop
        are sent in groups."""
        self._heads.append(head)
        if not self._corked:
            self._corked = True
            asyncio.get_running_loop().call_soon(self._uncork)
            self.send()
        elif len(self._heads) >= HEADS:
            self.send()
        self.moved_bytes(HEAD_COST_BYTES)

    def send_map(self, fields: Mapping[str, Any]) -> None:
        self.send(codec.encode(fields))

    def fail(self, error: TriremeError) -> None:
        """Send the error to the peer, ignore what it sends, close."""
        if self.failure is not None or self.closed:
            return
        self.send_map({"error": error.to_map()})
        self.failure = error
        self.on_over(error)
        if self.transport is not None:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Close at once: nothing is read or written any more when this returns."""
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------ asyncio.BufferedProtocol

    def take_over(self, transport: asyncio.Transport, rest: bytes = b"") -> None:
        """Become the protocol of an upgraded connection. `rest`: bytes received after the upgrade."""
        transport.pause_reading()  # uvloop chooses how to read when reading starts
        transport.set_protocol(self)
        self.connection_made(transport)
        if rest:
            self._events = self._decoder.feed(memoryview(rest))
        self._go_on()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        _unbuffered(self.transport)
        plain = transport.get_extra_info("socket")
        if plain is not None and _is_local(plain):
            _tune(plain)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        # after a failure that memory may be in other use
        return self._vacant if self.failure is None else self._head

    def buffer_updated(self, count: int) -> None:
        self.moved = self._now()
        if self.failure is not None:
            return
        if self._vacant is not self._head:
            try:
                filled = self._decoder.advance(count)
                if filled is not None:
                    self.on_block(filled.payload)
            except TriremeError as error:
                self.fail(error)
        else:
            self._events = self._decoder.feed(self._head[:count])
            self._work()
        self._vacant = self._decoder.vacant or self._head
        self.moved_bytes(count)

    def eof_received(self) -> None:
        pass  # the transport closes itself

    def pause_writing(self) -> None:
        self.paused = True
        self.paused_at = clock.monotonic()

    def resume_writing(self) -> None:
        self.paused = False
        self.on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.transport = None
        if self.failure is None:
            why = f"{type(error).__name__}: {error}" if error is not None else "it was closed"
            clean = error is None and self._decoder.between_blocks
            self.on_over(None if clean else PeerError(f"the stream broke off inside a frame: {why}"))

    # ------------------------------------------------------------ parts

    def _work(self) -> None:
        """Handle received events until there are no more, or other tasks should have their turn."""
        try:
            for event in self._events:
                if isinstance(event, codec.Filled):
                    self.on_block(event.payload)
                else:
                    self.on_map(event.header)
                if self.failure is not None or self.rests:
                    return
        except TriremeError as error:
            self.fail(error)

    def _uncork(self) -> None:
        self._corked = False
        if self._heads:
            self.send()

    def _go_on(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return  # received events are dropped: the memory they refer to is not lent any more
        self._burst, self.rests = 0, False
        if not self.paused:
            self.on_writable()
        if self.failure is None and not self.rests:
            self._work()
            self._vacant = self._decoder.vacant or self._head
        if not self.rests and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()


def _unbuffered(transport: asyncio.Transport) -> None:
    """Its protocol's `pause_writing` is called whenever the transport keeps bytes: only then may it refer to
    memory it was given. TLS copies what it encrypts; at 0, its transports pause for ever."""
    transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1)


def _tune(plain: socket.socket) -> None:
    """Socket options for a peer on this host."""
    inside = plain.family == socket.AF_UNIX
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        plain.setsockopt(socket.SOL_SOCKET, option, LOCAL_BYTES)
    if not inside and hasattr(socket, "TCP_CONGESTION"):
        # congestion control that paces for networks (bbr) takes a third more processor time on the loopback
        # device
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _is_local(plain: socket.socket) -> bool:
    """Whether the peer is on this host. For peers elsewhere the kernel chooses buffer sizes itself."""
    if plain.family == socket.AF_UNIX:
        return True
    try:
        host: str = plain.getpeername()[0]
    except OSError:  # it is gone already
        return False
    return host == "::1" or host.startswith("127.")


Stream = TypeVar("Stream", bound=FrameStream)


class NotReached(PeerError):
    """Nobody takes connections there."""


class UpgradeRefused(PeerError):
    """The peer does not upgrade: it is another version, or something between it and us does not let the
    upgrade through."""


async def upgrade(
    url: str,
    make: Callable[[], Stream],
    meant: str,
    *,
    uds: str = "",
    token: Token = "",
    tls: ssl.SSLContext | None = None,
    limit_s: float = 2.0,
) -> Stream:
    """A stream to the pserver of the incarnation `meant` at `url`, through the UNIX socket `uds` if one is
    given; `tls`: for https. Raises NotReached, UpgradeRefused, Unauthorized, Forbidden, AnotherProcess,
    PeerError."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    where = uds or url
    request = [f"GET {PATH} HTTP/1.1", f"Host: {parts.netloc}", f"Upgrade: {UPGRADE}", "Connection: Upgrade"]
    request.append(f"{MEANT}: {meant}")
    if given := text_of(token):
        request.append(f"Authorization: Bearer {given}")
    handshake: _Handshake | None = None
    try:
        async with asyncio.timeout(limit_s):
            if uds:
                _, handshake = await loop.create_unix_connection(_Handshake, uds)
            else:
                secure = parts.scheme == "https"
                port = parts.port or (443 if secure else 80)
                _, handshake = await loop.create_connection(
                    _Handshake, parts.hostname or "", port, ssl=(tls or True) if secure else None
                )
            head, rest, transport = await handshake.exchange("\r\n".join([*request, "", ""]).encode())
    except TimeoutError as error:
        if handshake is not None:
            handshake.abort()
        msg = f"{where} did not answer within {limit_s:g} s to a request to upgrade"
        raise DeadlineExceeded(msg) from error
    except OSError as error:
        msg = f"connecting to {where} failed: {type(error).__name__}: {error}"
        raise NotReached(msg) from error
    except BaseException:
        if handshake is not None:
            handshake.abort()
        raise
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or status[1] != b"101":
        transport.abort()
        if status[1:2] == [b"401"]:
            raise Unauthorized(
                f"{where}: the token was refused",
                hint="give the cluster's token for members in TRIREME_TOKEN",
            )
        if status[1:2] == [b"403"]:
            raise Forbidden(
                f"{where}: streams need a token with the role member", hint="give it in TRIREME_TOKEN"
            )
        if status[1:2] == [b"421"]:
            raise AnotherProcess(f"{where} is not the parameter server {meant}; read its address again")
        msg = f"{where} does not upgrade to {UPGRADE}: {head.split(bytes((13,)), 1)[0][:100]!r}"
        raise UpgradeRefused(msg)
    stream = make()
    stream.take_over(transport, rest)
    return stream


class _Handshake(asyncio.Protocol):
    """Sends one request and reads the head of its answer; then reading is paused."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: asyncio.Future[tuple[bytes, bytes, asyncio.Transport]] = (
            asyncio.get_running_loop().create_future()
        )
        self._transport: asyncio.Transport | None = None

    async def exchange(self, request: bytes) -> tuple[bytes, bytes, asyncio.Transport]:
        """The head, the bytes after it, the transport."""
        assert self._transport is not None
        self._transport.write(request)
        return await self._head

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = bytes(self._received).partition(b"\r\n\r\n")
        if self._head.done() or self._transport is None:
            return
        if found:
            self._transport.pause_reading()
            self._head.set_result((head, rest, self._transport))
        elif len(self._received) > ANSWER_BYTES:
            self._head.set_exception(PeerError(f"an answer to an upgrade of more than {ANSWER_BYTES} bytes"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._head.done():
            why = f"{type(error).__name__}: {error}" if error is not None else "it closed the connection"
            self._head.set_exception(PeerError(f"the peer broke off before its answer to an upgrade: {why}"))


class MemberSession:
    """HTTP requests to a member: through its UNIX socket while that is there, else at its address. Close
    it."""

    def __init__(self, member: PserverMember, token: Token = "", tls: ssl.SSLContext | None = None) -> None:
        self._member, self._token, self._tls = member, token, tls
        self._by_socket: dict[str, aiohttp.ClientSession] = {}

    def __repr__(self) -> str:
        return f"<MemberSession to {self._member.name}>"

    def __call__(self) -> aiohttp.ClientSession:
        """For one request."""
        uds = socket_of(self._member)
        if uds not in self._by_socket:
            meant = self._member.incarnation
            self._by_socket[uds] = session(self._token, uds=uds, tls=self._tls, meant=meant)
        return self._by_socket[uds]

    async def close(self) -> None:
        while self._by_socket:
            _, last = self._by_socket.popitem()
            await last.close()


def socket_of(member: PserverMember) -> str:
    """The member's UNIX socket if it is on this host and open to this user, else empty."""
    here = member.host == socket.gethostname() and is_here(member.network)
    return member.uds if member.uds and here and os.access(member.uds, os.W_OK) else ""
