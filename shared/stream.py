"""One upgraded connection: frames in both directions at once, read into and written from the memory they live in (wire.md).

    GET /v1/stream, Upgrade: trireme-frames/1  --101-->  map | [map, bin] | map | ...       the same in both directions

    {"id": 3, "call": "push", "message": PushHeader}  [{"id": 3, ...PushBlock}, bin] ...  {"id": 3, "end": true}
    {"id": 4, "call": "pull", "message": PullRequest}
                                      answers:  [{"id": 4, ...PulledBlock}, bin] ...  {"id": n, "end": true, "message": ...}
                                                {"id": n, "error": {...}}: that request is refused;  without id: all are over

Frames of several requests may alternate. What is malformed ends the connection with a typed error.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, cast

from shared import clock, wire
from shared.errors import PeerError, TriremeError

UPGRADE = "trireme-frames/1"
PATH = "/v1/stream"
SOCKET_BYTES = 4 << 20  # asked of the kernel for each direction: some blocks travel while others are worked on
HEAD_BYTES = 8 << 10  # read at once where no payload is expected; what of it belongs to a payload is copied
BURST_BYTES = 4 << 20  # read before others get their turn in the event loop
LINGER_S = 2.0  # for the peer to read the reason why its connection is closed


class FrameStream(asyncio.BufferedProtocol):
    """Both ends. A subclass says where payloads go (`place`, see wire.Decoder) and what becomes of frames.

    What was given to `send` must not change until `paused` is False: the transport refers to it.
    """

    def __init__(self, limits: wire.Limits) -> None:
        self.paused = False
        self.closed = False
        self.failure: TriremeError | None = None
        self.moved = self.paused_at = clock.monotonic()  # when bytes last came; when the transport was last full
        self._transport: asyncio.Transport | None = None
        self._decoder = wire.Decoder(limits, self.place, endless=True)
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._burst = 0

    # ------------------------------------------------------------ for subclasses

    def place(self, header: wire.Fields, size: int) -> memoryview | None:
        """Where a block's payload goes; None: nowhere. Raises what ends the connection."""
        raise NotImplementedError

    def on_map(self, fields: wire.Fields) -> None:
        """Raises what ends the connection."""
        raise NotImplementedError

    def on_block(self, payload: memoryview) -> None:
        """The block that `place` was last asked for is complete, in the memory that it gave. Raises what ends the connection."""
        raise NotImplementedError

    def on_writable(self) -> None:
        """The transport holds nothing any more."""

    def on_over(self, error: TriremeError | None) -> None:
        """Called once: no frame will come any more (`error` None: the connection ended between two frames)."""

    # ------------------------------------------------------------ out

    def send(self, *parts: bytes | memoryview) -> None:
        if self._transport is not None and not self.closed and self.failure is None:
            self._transport.writelines(parts)

    def send_map(self, fields: Mapping[str, Any]) -> None:
        self.send(wire.encode(fields))

    def fail(self, error: TriremeError) -> None:
        """Tell the peer why, stop listening to it, close."""
        if self.failure is not None or self.closed:
            return
        self.send_map({"error": error.to_map()})
        self.failure = error
        self.on_over(error)
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Close at once: nothing is read or written any more when this returns."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio.BufferedProtocol

    def take_over(self, transport: asyncio.Transport, rest: bytes = b"") -> None:
        """Become the protocol of a connection that was upgraded; `rest` came after the upgrade's last byte."""
        transport.pause_reading()  # uvloop chooses how to read when reading starts
        transport.set_protocol(self)
        self.connection_made(transport)
        if rest:
            self._feed(memoryview(rest))
        if not self.closed:
            transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(high=0)  # so that `paused` tells whether it refers to our memory
        plain = transport.get_extra_info("socket")
        if plain is not None:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                plain.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        vacant = self._decoder.vacant
        return (
            vacant if vacant and self.failure is None else self._head
        )  # after a failure its memory is somebody else's

    def buffer_updated(self, count: int) -> None:
        self.moved = clock.monotonic()
        if self.failure is not None:
            return
        if self._decoder.vacant:
            try:
                filled = self._decoder.advance(count)
                if filled is not None:
                    self.on_block(filled.payload)
            except TriremeError as error:
                self.fail(error)
        else:
            self._feed(self._head[:count])
        self._burst += count
        if self._burst >= BURST_BYTES and self._transport is not None:
            self._burst = 0
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

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
        self._transport = None
        if self.failure is None:
            why = f"{type(error).__name__}: {error}" if error is not None else "it was closed"
            clean = error is None and self._decoder.between_blocks
            self.on_over(None if clean else PeerError(f"the stream broke off inside a frame: {why}"))

    # ------------------------------------------------------------ parts

    def _feed(self, data: memoryview) -> None:
        try:
            for event in self._decoder.feed(data):
                if isinstance(event, wire.Filled):
                    self.on_block(event.payload)
                else:
                    self.on_map(event.header)
                if self.failure is not None:
                    return
        except TriremeError as error:
            self.fail(error)

    def _go_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
