"""A PserverPort over an upgraded stream (shared/trireme_shared/serving/transport/stream.py): one connection, pushes and pulls at the same time.

    none --first call--> connected --calls, by id--> ... --an error, a timeout, a cancelled call--> none, calls in flight fail

A call that does not come to its end takes the connection with it: no byte of it can arrive anywhere afterwards. The next
call connects again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any

from trainer_agent.data_plane.http import HttpPserver, Placed, Sink, socket_of
from trainer_agent.data_plane.trainer_stream import TrainerStream
from trireme_shared.platform.runtime import clock, http, telemetry
from trireme_shared.protocol.errors import CallerError, NotReady, PeerError
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import (
    LookupEnd,
    LookupRequest,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
)
from trireme_shared.serving.transport.shared_memory import Place
from trireme_shared.serving.transport.stream import UpgradeRefused, upgrade

CONNECT_S = 2.0

log = telemetry.logger("stream")


class StreamPserver(HttpPserver):
    """A PserverPort: pushes, pulls and lookups on the stream, over the UNIX socket if the member is on this host, else TCP; the
    rest as plain requests. Close it (`async with`).

    `share`: over a UNIX socket, each side reads payloads where the other has them, if both can."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = 30.0,
        share: bool = True,
    ) -> None:
        super().__init__(member, token, tls=tls, stall_s=stall_s)
        self.stream: TrainerStream | None = None
        self._connecting = asyncio.Lock()
        self._failed: tuple[float, PeerError] | None = None  # when the last attempt to connect failed, and why
        self._share = share

    def __repr__(self) -> str:
        return f"<StreamPserver {self.member.name} at {self.member.url}: {self.stream!r}>"

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.close()
        await super().close()

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]) -> PushAnswer:
        """Payloads must stay unchanged until this returns."""
        stream = await self._connected()
        with stream.call("push", header) as (number, call):
            try:
                async with leave_when_done(call.answer):  # an answer before the end is a refusal: send no more
                    async for item, payload in blocks:
                        view = memoryview(payload).cast("B")
                        await stream.taken(self._stall_s)
                        at = await stream.refer(call, view, self._stall_s)
                        size = 0 if at else view.nbytes
                        head = head_of(number, item.block, item.lanes, item.count, item.dtype, size, at)
                        if item.result is not None or item.rows is not None or item.version is not None:
                            fields = fields_of(number, item) | ({"at": at} if at else {})
                            head = codec.encode_block(fields, size)
                        if at:
                            stream.send_head(head)
                        else:
                            stream.send(head, view)
                        await stream.taken(self._stall_s)
            except BaseException:
                if call.answer.done():  # refused: over there it is open until its end, and its number is used again
                    stream.send_map({"id": number, "end": True})
                raise
            stream.send_map({"id": number, "end": True})
            return codec.read(PushAnswer, await stream.answered(call, self._stall_s))

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        stream = await self._connected()
        with stream.call("pull", request, sink, placed) as (_, call):
            return codec.read(PullEnd, await stream.answered(call, self._stall_s + waits_s(request)))

    async def lookup(self, request: LookupRequest, ids: memoryview) -> tuple[LookupEnd, memoryview]:
        stream = await self._connected()
        with stream.call("lookup", request) as (number, call):
            await stream.taken(self._stall_s)
            if ids.nbytes:
                stream.send(codec.encode_block({"id": number, "lookup": True}, ids.nbytes), ids)
            await stream.taken(self._stall_s)
            stream.send_map({"id": number, "end": True})
            end = codec.read(LookupEnd, await stream.answered(call, self._stall_s + request.wait_s))
            return end, call.rows

    async def _connected(self) -> TrainerStream:
        """Raises PeerError: an attempt that failed counts for all calls that waited for it."""
        began = clock.monotonic()
        async with self._connecting:
            if self._failed is not None and self._failed[0] > began:
                raise self._failed[1].with_traceback(None)
            if self.stream is None or not self.stream.usable:
                self.stream = await self._opened()
            if self._share and not self.stream.memory.on:
                await self._try_to_share(self.stream)
                if not self.stream.usable:  # it was given up, since what it was told cannot be taken back
                    self.stream = await self._opened()
            return self.stream

    async def _opened(self) -> TrainerStream:
        name = f"{self.member.name} at {self.member.url}"
        uds = socket_of(self.member)
        make, limit_s = partial(TrainerStream, name), min(CONNECT_S, self._stall_s)
        self._share = self._share and bool(uds) and not (self.stream is not None and self.stream.memory.unreadable)
        try:
            url, meant = self.member.url, self.member.incarnation
            stream = await upgrade(url, make, meant, uds=uds, token=self._token, tls=self._tls, limit_s=limit_s)
        except PeerError as error:
            if isinstance(error, UpgradeRefused):
                log.warning("upgrade_refused", pserver=self.member.name, cause=error.message)
            self._failed = clock.monotonic(), error
            raise
        log.info("stream_open", pserver=self.member.name, over="unix" if uds else "tcp")
        return stream

    async def _try_to_share(self, stream: TrainerStream) -> None:
        """Not yet while the pserver has no parameters; never again once it is known that it cannot be."""
        try:
            await stream.share(self._stall_s)
        except NotReady:
            return
        except CallerError as error:
            self._share = False
            log.info("memory_not_shared", pserver=self.member.name, cause=error.message)
            if stream.memory.unreadable:
                await stream.close()
        else:
            log.info("memory_shared", pserver=self.member.name)


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def head_of(
    number: int, block: int, lanes: Interval, samples: int, dtype: str | None, size: int, at: Place | None
) -> bytes:
    """What precedes a pushed block; the same in every step."""
    fields: codec.Fields = {"id": number, "block": block, "lanes": lanes, "count": samples}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


def fields_of(number: int, item: PushBlock) -> codec.Fields:
    """Of a block with a result or a version, or of rows; Record.model_dump takes three times as long."""
    fields: codec.Fields = {"id": number, "block": item.block, "lanes": item.lanes, "count": item.count}
    if (result := item.result) is not None:
        fields["result"] = {
            "loss_sum": result.loss_sum,
            "records": result.records,
            "skipped": result.skipped,
            "metrics": result.metrics,
        }
    if item.version is not None:
        fields["version"] = item.version
    if item.rows is not None:
        fields |= {"rows": item.rows, "slots": item.slots}
    return fields | ({"dtype": item.dtype} if item.dtype else {})


@asynccontextmanager
async def leave_when_done(future: asyncio.Future[Any]) -> AsyncIterator[None]:
    """Run the block, but leave it as soon as `future` is done, wherever the block waits."""
    inside = True
    try:
        async with asyncio.timeout(None) as limit:

            def leave(_: object) -> None:
                if inside:
                    limit.reschedule(clock.monotonic())

            future.add_done_callback(leave)
            try:
                yield
            finally:
                inside = False
                future.remove_done_callback(leave)
    except TimeoutError:
        if not limit.expired():
            raise


def waits_s(request: PullRequest) -> float:
    """How long the pserver may wait before it sends the first block: a pull of what is there does not wait."""
    return 0.0 if request.version is None else request.wait_s
