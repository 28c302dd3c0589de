"""One parameter server as the trainer sees it (PserverPort), and those of its calls that are plain requests
(stream.py has the others).

Each wait for the peer is limited to `stall_s`; the caller's iterator may take as long as it needs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Protocol, Self, TypeVar

import aiohttp

from trireme_shared.platform.runtime import clock, http
from trireme_shared.protocol.errors import (
    BadFrame,
    DeadlineExceeded,
    PeerError,
    TooLarge,
    TriremeError,
    from_map,
)
from trireme_shared.protocol.records import PserverMember, Record
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import (
    InitBlock,
    InitHeader,
    LedgerAnswer,
    LedgerQuery,
    LookupEnd,
    LookupRequest,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
    TableEnd,
    TableRequest,
)
from trireme_shared.serving.transport.stream import MemberSession
from trireme_shared.tables.payload import MOST_BYTES

Sink = Callable[[PulledBlock], memoryview]
Placed = Callable[[PulledBlock], None]
Answer = TypeVar("Answer", bound=Record)
Body = bytes | AsyncGenerator[bytes | memoryview, None] | None

ANSWER_BYTES = 64 << 20  # of an answer without blocks
SLICE_BYTES = 256 << 10
READ_BUFFER_BYTES = 1 << 20


class PserverPort(Protocol):
    """The calls of one pserver. All raise the errors of trireme_shared.protocol.errors; PeerError if the
    connection fails."""

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, memoryview]]) -> None:
        """Load initial values; idempotent."""
        ...

    async def push(
        self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]
    ) -> PushAnswer:
        """Payloads must stay unchanged until this returns."""
        ...

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        """`sink` returns the memory to write a block to; `placed` is called when all of its bytes are
        there."""
        ...

    async def lookup(self, request: LookupRequest, ids: memoryview) -> tuple[LookupEnd, memoryview]:
        """The end, and the payload of rows: empty if there is none."""
        ...

    async def table(self, request: TableRequest) -> tuple[TableEnd, memoryview]:
        """The end, and the payload of ids and rows."""
        ...

    async def info(self) -> PserverInfo: ...

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer: ...


class HttpPserver:
    """The plain requests of a PserverPort: initial values, whole tables, information. Uses the member's UNIX
    socket if it is on this host. Close it (`async with`)."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = 30.0,
    ) -> None:
        self.member = member
        self._token, self._tls = token, tls
        self.session = MemberSession(member, token, tls)
        self._stall_s = stall_s
        self._name = f"<HttpPserver {member.name} at {member.url}>"

    def __repr__(self) -> str:
        return self._name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.session.close()

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, memoryview]]) -> None:
        """Send blocks as the caller makes them; only waits for the pserver have a limit."""
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._stall_s) as limit:

                def until(seconds: float | None) -> None:
                    if not limit.expired():
                        limit.reschedule(None if seconds is None else clock.monotonic() + seconds)

                async def body() -> AsyncGenerator[bytes | memoryview, None]:
                    nonlocal failure
                    try:
                        yield codec.encode(header)
                        until(None)
                        async for item, payload in blocks:
                            view = memoryview(payload).cast("B")
                            until(self._stall_s)
                            yield codec.encode_block(item, view.nbytes)
                            for part in _slices(view):
                                until(self._stall_s)
                                yield part
                            until(None)
                        until(self._stall_s)
                        yield codec.encode_end()
                    except Exception as error:
                        failure = error
                        raise

                async with self._request("POST", "/v1/init", body()) as response:
                    await self._answer(response, PserverInfo)
        except TimeoutError as error:
            raise self._silent("/v1/init") from error
        except PeerError:
            if failure is not None:
                raise failure from None  # the caller's iterator failed, not the connection
            raise

    async def table(self, request: TableRequest) -> tuple[TableEnd, memoryview]:
        rows = memoryview(b"")

        def place(_: codec.Fields, size: int) -> memoryview:
            nonlocal rows
            rows = memoryview(bytearray(size))
            return rows

        decoder = codec.Decoder(codec.Limits(payload_bytes=MOST_BYTES, blocks=1), place)
        end: codec.Fields = {}
        try:
            async with (
                asyncio.timeout(self._stall_s),
                self._request("POST", "/v1/table", codec.encode(request)) as response,
            ):
                async for chunk in response.content.iter_any():
                    for event in decoder.feed(chunk):
                        if isinstance(event, codec.Ended):
                            end = event.header
        except TimeoutError as error:
            raise self._silent("/v1/table") from error
        decoder.finish()
        return codec.read(TableEnd, end), rows

    async def info(self) -> PserverInfo:
        return await self._ask("/v1/info", None, PserverInfo)

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        return await self._ask("/v1/ledger", query, LedgerAnswer)

    async def _ask(self, path: str, query: Record | None, kind: type[Answer]) -> Answer:
        body = None if query is None else codec.encode(query)
        try:
            async with (
                asyncio.timeout(self._stall_s),
                self._request("POST" if body else "GET", path, body) as response,
            ):
                return await self._answer(response, kind)
        except TimeoutError as error:
            raise self._silent(path) from error

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Body
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """The answer to one request. Raises the error it holds, PeerError if the connection fails."""
        try:
            async with self.session().request(
                method,
                self.member.url.rstrip("/") + path,
                data=body,
                headers={"Content-Type": codec.CONTENT_TYPE},
                read_bufsize=READ_BUFFER_BYTES,
            ) as response:
                try:
                    if response.status >= 400:
                        raise await self._error(response)
                    yield response
                except BaseException:
                    response.close()  # stop writing the request
                    raise
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise PeerError(
                f"{method} {path} at {self._name} failed: {type(error).__name__}: {error}"
            ) from error

    def _silent(self, path: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{path} at {self._name}: nothing moved for {self._stall_s:g} s", silent_s=self._stall_s
        )

    @staticmethod
    async def _answer(response: aiohttp.ClientResponse, kind: type[Answer]) -> Answer:
        return codec.read(kind, codec.decode(await _whole(response), ANSWER_BYTES))

    async def _error(self, response: aiohttp.ClientResponse) -> TriremeError:
        try:
            return from_map(codec.decode(await _whole(response), ANSWER_BYTES))
        except BadFrame:
            return PeerError(f"{self._name} answered {response.status} {response.reason}")


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises TooLarge."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise TooLarge(f"an answer of more than {ANSWER_BYTES} bytes from {response.url}")
    return bytes(body)


def _slices(payload: memoryview) -> list[memoryview]:
    """Parts of about SLICE_BYTES, each written at once."""
    count = max(1, payload.nbytes // SLICE_BYTES)
    cuts = [payload.nbytes * index // count for index in range(count + 1)]
    return [payload[first:last] for first, last in pairwise(cuts) if last > first]
