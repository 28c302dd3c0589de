"""The routes of the data plane: what a job needs once or seldom as plain requests, what every step needs on a
stream. Nothing is decided here.

GET  /v1/stream, Upgrade: trireme-frames/1     ->  101, then pushes, pulls and lookups as frames
                                                   (serving/transport/stream.py)

POST /v1/init             header, blocks, end  ->  PserverInfo map
POST /v1/table            TableRequest map     ->  header, ids and rows, end
POST /v1/handoffs         header, parts, end   ->  HandoffAnswer map
POST /v1/ledger           LedgerQuery map      ->  LedgerAnswer map
GET  /v1/info                                  ->  PserverInfo map (JSON if the caller accepts only that)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import pairwise
from typing import Generic, TypeVar

from aiohttp import StreamReader, web

from trireme_shared.protocol.errors import BadFrame, DeadlineExceeded, InvalidArgument, TooLarge
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import (
    PROTOCOL_VERSION,
    HandoffHeader,
    HandoffPart,
    InitBlock,
    InitHeader,
    LedgerQuery,
    LookupIds,
    TableRequest,
)
from trireme_shared.serving.core.geometry import MAX_BLOCK_BYTES, MAX_BLOCKS, MAX_INIT_PARTS
from trireme_shared.serving.data_plane.lookups import portion
from trireme_shared.serving.data_plane.stream import PSERVER, TIME_LIMITS, TimeLimits
from trireme_shared.serving.pserver import Pserver

Header = TypeVar("Header", bound=Record)
Item = TypeVar("Item", bound=Record)
SLICE_BYTES = 256 << 10  # written at once: large enough to be cheap, small enough to share the loop
# aiohttp waits for the peer only after so many bytes; less is copied, so the buffer is free at once
SMALL_BYTES = 64 << 10
MESSAGE_BYTES = 16 << 20  # of a message without blocks


routes = web.RouteTableDef()


@routes.get("/v1/info")
async def info(request: web.Request) -> web.Response:
    answer = await request.app[PSERVER].info()
    if request.headers.get("Accept", "").startswith("application/json"):
        return web.json_response(text=answer.model_dump_json(exclude_none=True))
    return _message(answer)


@routes.post("/v1/init")
async def init(request: web.Request) -> web.Response:
    pserver = _parameter_server(request)
    body = Incoming(request.content, InitHeader, InitBlock, request.app[TIME_LIMITS])
    header = await body.open()
    limits = codec.Limits(
        payload_bytes=min(header.layout.block_bytes, MAX_BLOCK_BYTES), blocks=MAX_INIT_PARTS
    )
    await pserver.init(header, body.blocks(limits))
    return _message(await pserver.info())


@routes.post("/v1/table")
async def table(request: web.Request) -> web.Response:
    pserver = request.app[PSERVER]
    end, rows = portion(pserver, codec.read(TableRequest, await _body(request)))
    opening = {"protocol": PROTOCOL_VERSION, "job": pserver.job, "generation": pserver.generation}
    parts = (
        codec.encode(opening),
        codec.encode_block(LookupIds(), rows.nbytes),
        bytes(rows),
        codec.encode_end(end),
    )
    return web.Response(body=b"".join(parts), content_type=codec.CONTENT_TYPE)


@routes.post("/v1/handoffs")
async def handoffs(request: web.Request) -> web.Response:
    """Blocks that come from another parameter server."""
    pserver = _parameter_server(request)
    body = Incoming(request.content, HandoffHeader, HandoffPart, request.app[TIME_LIMITS])
    header = await body.open()
    limits = codec.Limits(payload_bytes=MAX_BLOCK_BYTES, blocks=MAX_BLOCKS)
    return _message(await pserver.take_handoff(header, body.blocks(limits)))


@routes.post("/v1/ledger")
async def ledger(request: web.Request) -> web.Response:
    query = codec.read(LedgerQuery, await _body(request))
    return _message(await _parameter_server(request).ledger(query))


def _parameter_server(request: web.Request) -> Pserver:
    """Raises InvalidArgument: a trainer of a collective job was asked."""
    server = request.app[PSERVER]
    if not isinstance(server, Pserver):
        msg = (
            f"{request.path} is answered by parameter servers only, and {server.name} is a trainer of "
            "a collective job"
        )
        raise InvalidArgument(msg, hint="job and trainers have to agree on `strategy`")
    return server


def _message(record: Record) -> web.Response:
    return web.Response(body=codec.encode(record), content_type=codec.CONTENT_TYPE)


async def _body(request: web.Request) -> codec.Fields:
    """A message without blocks. Raises BadFrame, TooLarge, DeadlineExceeded."""
    body = Incoming(request.content, Record, Record, request.app[TIME_LIMITS])
    return codec.decode(await body.whole(MESSAGE_BYTES), MESSAGE_BYTES)


# -------------------- bodies: frames come in with bounds and time limits, blocks go out from their own memory


class Incoming(Generic[Header, Item]):
    """A request's body: `open()` returns its header, then `blocks()` yields the blocks."""

    def __init__(
        self, content: StreamReader, header: type[Header], item: type[Item], time_limits: TimeLimits
    ) -> None:
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

    async def blocks(self, limits: codec.Limits) -> AsyncIterator[tuple[Item, memoryview]]:
        """All blocks up to the end map. A payload is valid until the next is asked for. Raises BadFrame,
        TooLarge, DeadlineExceeded; blocks yielded before were complete."""
        self._decoder.limits = limits
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
    """Send one block. Its payload must stay as it is until the answer is over: the transport may still refer
    to it."""
    size = payload.nbytes
    if size <= SMALL_BYTES:
        await response.write(prefix + bytes(payload))
        return
    await response.write(prefix)
    slices = max(1, size // SLICE_BYTES)
    cuts = [size * index // slices for index in range(slices + 1)]
    for first, last in pairwise(cuts):
        await response.write(payload[first:last])
