"""Bodies of the data plane over aiohttp: frames come in with bounds and time limits, blocks go out from their own memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from aiohttp import StreamReader, web

from trireme_shared.protocol.errors import BadFrame, DeadlineExceeded, TooLarge
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.wire import codec

Header = TypeVar("Header", bound=Record)
Item = TypeVar("Item", bound=Record)
SLICE_BYTES = 256 << 10  # written at once: large enough to be cheap, small enough to share the loop
# aiohttp waits for the peer only after so many bytes; less is copied, so the buffer is free at once
SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a peer may send nothing: inside a message (`stall_s`), and between two blocks, while it computes (`idle_s`)."""

    stall_s: float
    idle_s: float


class Incoming(Generic[Header, Item]):
    """A request's body: `open()` returns its header, then `blocks()` yields the blocks."""

    def __init__(self, content: StreamReader, header: type[Header], item: type[Item], time_limits: TimeLimits) -> None:
        self._content = content
        self._header_kind, self._item_kind = header, item
        self._time_limits = time_limits
        self._memory = memoryview(b"")
        self._item: Item | None = None
        self._decoder = codec.Decoder(codec.Limits(payload_bytes=0, blocks=0), self._place)
        self._events = self._read()

    async def open(self) -> Header:
        """Raises BadFrame, TooLarge, DeadlineExceeded."""
        event = await anext(self._events, None)
        if not isinstance(event, codec.Opened):
            msg = "the body is empty: expected the message's header map"
            raise BadFrame(msg)
        return codec.read(self._header_kind, event.header)

    async def blocks(
        self, limits: codec.Limits, memory: memoryview | None = None
    ) -> AsyncIterator[tuple[Item, memoryview]]:
        """All blocks up to the end map. A payload is valid until the next is asked for; it lies in `memory` (of
        `limits.payload_bytes`), if given. Raises BadFrame, TooLarge, DeadlineExceeded; blocks yielded before were complete."""
        self._decoder.limits = limits
        if memory is not None:
            self._memory = memory
        async for event in self._events:
            if isinstance(event, codec.Filled):
                assert self._item is not None
                yield self._item, event.payload

    async def whole(self, limit: int) -> bytes:
        """The body as one message without blocks. Raises TooLarge, DeadlineExceeded."""
        body = bytearray()
        while chunk := await self._chunk():
            body += chunk
            if len(body) > limit:
                msg = f"a message of more than {limit} bytes"
                raise TooLarge(msg)
        return bytes(body)

    def _place(self, header: codec.Fields, size: int) -> memoryview:
        self._item = codec.read(self._item_kind, header)
        if self._memory.nbytes < size:
            self._memory = memoryview(bytearray(size))
        return self._memory[:size]

    async def _read(self) -> AsyncGenerator[codec.Event, None]:
        while chunk := await self._chunk():
            for event in self._decoder.feed(chunk):
                yield event
        self._decoder.finish()

    async def _chunk(self) -> bytes:
        """The next bytes, empty at the end."""
        limit_s = self._time_limits.idle_s if self._decoder.between_blocks else self._time_limits.stall_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._content.readany()
        except TimeoutError as error:
            msg = f"no byte of the body came for {limit_s:g} s; {self._decoder.blocks} blocks were read"
            raise DeadlineExceeded(msg) from error


async def write_block(response: web.StreamResponse, prefix: bytes, payload: memoryview) -> None:
    """Send one block. On return the transport does not refer to `payload` any more (its write buffer limit is 0)."""
    size = payload.nbytes
    if size <= SMALL_BYTES:
        await response.write(prefix + bytes(payload))
        return
    await response.write(prefix)
    slices = max(1, size // SLICE_BYTES)
    cuts = [size * index // slices for index in range(slices + 1)]
    for first, last in pairwise(cuts):
        await response.write(payload[first:last])
