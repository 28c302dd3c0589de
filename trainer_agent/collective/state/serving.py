"""Blocks with their optimizers' state from one trainer to another, as plain requests.

POST /v1/state      StateRequest map  ->  StateHead, each part as StatePart + payload, end
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import aiohttp
from aiohttp import web

from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.collective.state.messages import Portion, StateHead, StatePart, StateRequest
from trainer_agent.data_plane.http import socket_of
from trireme_shared.platform.runtime import clock, http
from trireme_shared.protocol.errors import BadFrame, DeadlineExceeded, NotReady, PeerError, from_map
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.core.geometry import MAX_BLOCK_BYTES
from trireme_shared.serving.data_plane.http import write_block

PATH = "/v1/state"
REQUEST_BYTES = 16 << 20
ERROR_BYTES = 1 << 20
MOST_STATES = 16  # tensors of one block's optimizer
MOST_ROW_PARTS = 1 << 16  # of one portion: a slot is never divided
STALL_S = 30.0
READ_BUFFER_BYTES = 1 << 20
GIVER: web.AppKey[Callable[[], StateGiver | None]] = web.AppKey("giver")


def add_route(app: web.Application, giver: Callable[[], StateGiver | None]) -> None:
    """To the application of a trainer's share; there may be a giver later only."""
    app[GIVER] = giver
    app.router.add_post(PATH, _state)


async def _state(request: web.Request) -> web.StreamResponse:
    async with asyncio.timeout(STALL_S):
        body = await request.content.read(REQUEST_BYTES)
    wanted = codec.read(StateRequest, codec.decode(body, REQUEST_BYTES))
    giver = request.app[GIVER]()
    if giver is None:
        raise NotReady("this trainer has no parameters yet")
    portion = await giver.give(wanted)
    response = web.StreamResponse(headers={"Content-Type": codec.CONTENT_TYPE})
    await response.prepare(request)
    async with asyncio.timeout(STALL_S):
        await response.write(codec.encode(portion.head))
    for part, payload in portion.parts:
        async with asyncio.timeout(STALL_S):
            await write_block(response, codec.encode_block(part, payload.nbytes), payload)
    async with asyncio.timeout(STALL_S):
        await response.write(codec.encode_end())
        await response.write_eof()
    return response


class HttpDonor:
    """A Donor by plain requests, over its UNIX socket if that is on this host. Close it."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._member, self._token, self._tls, self._stall_s = member, token, tls, stall_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<HttpDonor {self.name} at {self._member.url}>"

    @property
    def name(self) -> str:
        return self._member.incarnation

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def state(self, request: StateRequest) -> Portion:
        """Raises the error of the answer; DeadlineExceeded: nothing moved for `stall_s`; PeerError: the connection failed, or the answer breaks the
        protocol."""
        self._session = self._session or http.session(
            self._token, uds=socket_of(self._member), tls=self._tls, meant=self._member.incarnation
        )
        url, headers = self._member.url.rstrip("/") + PATH, {"Content-Type": codec.CONTENT_TYPE}
        try:
            async with (
                asyncio.timeout(self._stall_s) as limit,
                self._session.post(
                    url, data=codec.encode(request), headers=headers, read_bufsize=READ_BUFFER_BYTES
                ) as response,
            ):
                if response.status >= 400:
                    raise from_map(codec.decode(await response.content.read(ERROR_BYTES), ERROR_BYTES))
                return await self._read(response, request, limit)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self!r}: nothing moved for {self._stall_s:g} s") from error
        except BadFrame as error:
            raise PeerError(f"{self!r} gave no answer that can be read: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerError(f"{self!r} failed: {type(error).__name__}: {error}") from error

    async def _read(self, response: aiohttp.ClientResponse, request: StateRequest, limit: asyncio.Timeout) -> Portion:
        parts: list[tuple[StatePart, memoryview]] = []

        def place(header: codec.Fields, size: int) -> memoryview:
            parts.append((codec.read(StatePart, header), memoryview(bytearray(size))))
            return parts[-1][1]

        blocks = MOST_ROW_PARTS if request.rows else len(request.blocks) * (1 + MOST_STATES)
        decoder = codec.Decoder(codec.Limits(payload_bytes=MAX_BLOCK_BYTES, blocks=blocks), place)
        head: StateHead | None = None
        async for chunk in response.content.iter_any():
            limit.reschedule(clock.monotonic() + self._stall_s)
            for event in decoder.feed(chunk):
                if isinstance(event, codec.Opened):
                    head = codec.read(StateHead, event.header)
        decoder.finish()
        if head is None:
            raise BadFrame("the answer is empty")
        return Portion(head, parts)
