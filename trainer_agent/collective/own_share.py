"""A trainer's own share of the blocks, as it reaches those of the others: without a connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from trainer_agent.collective.server import ShareServer
from trainer_agent.data_plane.http import Placed, Sink
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.wire.messages import PserverInfo, PullEnd, PullRequest, PushAnswer, PushBlock, PushHeader


class OwnShare:
    """A PserverPort. What is pushed is read where it lies, and only during the call."""

    def __init__(self, server: ShareServer) -> None:
        self._server = server

    def __repr__(self) -> str:
        return f"<OwnShare {self._server!r}>"

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]) -> PushAnswer:
        async def only_read() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
            async for item, payload in blocks:
                yield item, memoryview(payload).cast("B").toreadonly()

        return await self._server.push(header, only_read())

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        async with aclosing(self._server.pull(request)) as items:
            async for item in items:
                if isinstance(item, PullEnd):
                    return item
                block, payload = item
                sink(block).cast("B")[:] = payload
                if placed is not None:
                    placed(block)
        raise AssertionError("a pull ended without PullEnd")

    async def info(self) -> PserverInfo:
        return await self._server.info()

    async def init(self, *_: Any) -> None:
        raise _no_such_call("init")

    async def lookup(self, *_: Any) -> Any:
        raise _no_such_call("lookup")

    async def table(self, *_: Any) -> Any:
        raise _no_such_call("table")

    async def ledger(self, *_: Any) -> Any:
        raise _no_such_call("ledger")


def _no_such_call(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} was asked of a trainer's own share, which takes pushes and gives mean gradients alone"
    )
