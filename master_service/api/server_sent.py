"""A stream of server-sent events (text/event-stream), as browsers' EventSource and curl read it. Each has a
twin in JSON.

first messages ─► following(wait_s) ─► id, data ─► ...            nothing for HEARTBEAT_S ─► a comment
the reader takes nothing for SLOW_S, LIFE_S are over, or `following` raises
    ─► closed; it comes again with Last-Event-ID

Nothing is kept for a reader: while it does not take what was sent, nothing more is read for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security.access import CALLER
from trireme_shared.protocol.errors import TooManyRequests, TriremeError

HEARTBEAT_S = 10.0
SLOW_S = 20.0
LIFE_S = 900.0  # then its token is looked at again
RETRY_MS = 1000  # how long a reader waits before it comes again

Messages = Sequence[tuple[str, str]]  # ids and data; each of one line

log = telemetry.logger("server_sent")


@dataclass(slots=True)
class Streams:
    """Those that are open in this process, by the name of the token that opened them. `share`: of one token,
    so that nobody keeps all others out; where nobody is asked for a token, there is none to share with."""

    most: int = 256
    share: int = 128
    _open: Counter[str] = field(default_factory=Counter)

    @property
    def open(self) -> int:
        return self._open.total()

    def check(self) -> None:
        """Raises TooManyRequests if the request that this task serves may open no more."""
        if self.open >= self.most:
            msg = (
                f"{self.open} streams of events are open here, at most {self.most} may be; ask with "
                "wait_s, or later"
            )
            raise TooManyRequests(msg)
        token = _asking()
        if token and self._open[token] >= self.share:
            msg = (
                f"token {token} has {self._open[token]} streams of events open here, at most {self.share} of "
                "one token may be; ask with wait_s, or give each program a token of its own"
            )
            raise TooManyRequests(msg)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        token = _asking()
        self._open[token] += 1
        try:
            yield
        finally:
            self._open[token] -= 1
            if not self._open[token]:
                del self._open[token]


def _asking() -> str:
    caller = CALLER.get()
    return caller.token if caller is not None else ""


class ServerSent(Response):
    """`following(wait_s)` gives what comes after the messages that it gave last; none after `wait_s`."""

    media_type = "text/event-stream"

    def __init__(
        self, first: Messages, following: Callable[[float], Awaitable[Messages]], streams: Streams
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._following, self._streams = first, following, streams

    # as Response's
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with self._streams.one_more():
            streaming = asyncio.ensure_future(self._stream(send))
            leaving = asyncio.ensure_future(until_gone(receive))
            try:
                await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if streaming.done():
                    streaming.result()
            finally:
                streaming.cancel()
                leaving.cancel()
                await asyncio.wait({streaming, leaving})

    async def _stream(self, send: Send) -> None:
        ends = clock.monotonic() + LIFE_S
        try:
            async with asyncio.timeout(SLOW_S):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, f"retry: {RETRY_MS}\n\n{_lines(self._first)}")
            while (left_s := ends - clock.monotonic()) > 0:
                await self._send(
                    send, _lines(await self._following(min(HEARTBEAT_S, left_s))) or ": still here\n\n"
                )
        except TimeoutError:
            log.info("reader_is_slow", cause=f"it took nothing for {SLOW_S:g} s")
            return
        except TriremeError as error:
            # not the leader any more, say: the reader comes again, and is told then
            log.info("stream_ends", cause=error.message)
        async with asyncio.timeout(SLOW_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        async with asyncio.timeout(SLOW_S):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def _lines(messages: Messages) -> str:
    return "".join(f"id: {name}\ndata: {data}\n\n" for name, data in messages)


async def until_gone(receive: Receive) -> None:
    """Wait until the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
