"""Blocks on their way to another parameter server: one streaming request for some parts of a group.

header, then each part as `HandoffPart` + payload, end --POST /v1/handoffs--> HandoffAnswer
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

import aiohttp

from trireme_shared.platform.runtime import clock, http
from trireme_shared.protocol.errors import BadFrame, DeadlineExceeded, PeerError, from_map
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart

SLICE_BYTES = 256 << 10
ANSWER_BYTES = 1 << 20
STALL_S = 5.0

Parts = Iterator[tuple[HandoffPart, memoryview]]


class HandoffPort(Protocol):
    """Another parameter server, as the one that hands blocks over sees it."""

    async def hand_over(self, header: HandoffHeader, parts: Parts) -> HandoffAnswer:
        """Payloads must stay unchanged until this returns. Raises the errors of
        trireme_shared.protocol.errors; PeerError if the connection fails."""
        ...

    async def close(self) -> None: ...


Connect = Callable[[PserverMember], HandoffPort]


class HttpHandoff:
    """A HandoffPort by plain requests over TCP. Close it."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._member, self._stall_s = member, stall_s
        self._token, self._tls = token, tls
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<HttpHandoff to pserver-{self._member.index} at {self._member.url}>"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def hand_over(self, header: HandoffHeader, parts: Parts) -> HandoffAnswer:
        """Raises DeadlineExceeded if nothing moves for `stall_s`."""
        self._session = self._session or http.session(
            self._token, tls=self._tls, meant=self._member.incarnation
        )
        url = f"{self._member.url.rstrip('/')}/v1/handoffs"
        try:
            async with asyncio.timeout(self._stall_s) as limit:

                async def body() -> AsyncGenerator[bytes | memoryview, None]:
                    yield codec.encode(header)
                    for part, payload in parts:
                        yield codec.encode_block(part, payload.nbytes)
                        for first in range(0, payload.nbytes, SLICE_BYTES):
                            if not limit.expired():
                                limit.reschedule(clock.monotonic() + self._stall_s)
                            yield payload[first : first + SLICE_BYTES]
                    yield codec.encode_end()

                headers = {"Content-Type": codec.CONTENT_TYPE}
                async with self._session.post(url, data=body(), headers=headers) as response:
                    fields = codec.decode(await response.content.read(ANSWER_BYTES), ANSWER_BYTES)
                    if response.status >= 400:
                        raise from_map(fields)
                    return codec.read(HandoffAnswer, fields)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self!r}: nothing moved for {self._stall_s:g} s") from error
        except BadFrame as error:
            raise PeerError(f"{self!r} gave no answer that can be read: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerError(f"{self!r} failed: {type(error).__name__}: {error}") from error
