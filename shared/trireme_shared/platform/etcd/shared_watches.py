"""Any number of watches over one connection to etcd: a leader has several for each job, and a connection for
each would use up its descriptors.

watch(create) ─► create_request with a number ─┐                        ┌─► messages of that number
watch(create) ─► create_request with a number ─┴─► one stream of etcd ──┴─► messages of that number
a watch is closed ─► cancel_request              the stream breaks ─► all watches raise; each opens anew

The stream is one HTTP request whose body goes on while its answer comes. etcd's server reads it so only where
the request says that its connection is closed afterwards (`Connection: close`): else it would read the body
to its end before it answers. What stands between may not pass it on like that either, see `never_spoke`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from copy import copy

from trireme_shared.platform.etcd.errors import Retryable
from trireme_shared.platform.etcd.operations import Body
from trireme_shared.protocol.errors import TriremeError

NOTIFIED = (
    64  # watches that etcd notifies of progress: a message a second for each is enough to hear that it lives
)
MOST_WAITING = 10_000  # messages of one watch that nobody has taken

OpenStream = Callable[[AsyncIterator[Body]], AsyncGenerator[Body, None]]


class SharedWatches:
    """`open_stream(requests)` sends each request as it comes and gives etcd's messages. One stream: once it
    is `ended`, make another. Nothing is opened before the first watch, and it ends with the last one."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._requests: asyncio.Queue[Body | None] = asyncio.Queue()
        self._watches: dict[int, asyncio.Queue[Body | TriremeError]] = {}
        self._uncreated: dict[int, None] = {}  # in their order
        self._number = 0
        self._reading: asyncio.Future[None] | None = None
        self._spoke = False
        self.ended = False

    def __repr__(self) -> str:
        return f"<SharedWatches {len(self._watches)}{', ended' if self.ended else ''}>"

    @property
    def never_spoke(self) -> bool:
        """It has ended, and nothing ever came."""
        return self.ended and not self._spoke

    async def watch(self, create: Body) -> AsyncGenerator[Body, None]:
        """The messages of one watch, as of a stream of its own. Raises what broke the stream."""
        assert not self.ended
        self._number = number = self._number + 1  # 0 would let etcd choose
        found: asyncio.Queue[Body | TriremeError] = asyncio.Queue()
        notify = create.get("progress_notify", False) and len(self._watches) < NOTIFIED
        self._watches[number], self._uncreated[number] = found, None
        self._requests.put_nowait(
            {"create_request": {**create, "watch_id": number, "progress_notify": notify}}
        )
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        cancelled = False
        try:
            while not cancelled:
                message = await found.get()
                if isinstance(message, TriremeError):
                    raise copy(message)  # each watch raises one of its own
                cancelled = message.get("canceled", False)
                yield message
        finally:
            self._watches.pop(number, None)
            self._uncreated.pop(number, None)
            if not self._watches:
                self.end()
            elif not cancelled:
                self._requests.put_nowait({"cancel_request": {"watch_id": number}})

    def end(self) -> None:
        self.ended = True
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        error: TriremeError = Retryable("etcd ended the watches")
        try:
            async with aclosing(self._open_stream(self._sent())) as messages:
                async for message in messages:
                    self._spoke = True
                    self._deliver(message)
        except TriremeError as broken:
            error = broken
        finally:
            self.ended = True
            for found in self._watches.values():
                found.put_nowait(error)

    async def _sent(self) -> AsyncIterator[Body]:
        while (request := await self._requests.get()) is not None:
            yield request

    def _deliver(self, message: Body) -> None:
        number = message.get("watch_id", 0)
        if message.get("created"):
            if number not in self._uncreated:  # refused: some versions of etcd do not say which one
                number = next(iter(self._uncreated), 0)
            self._uncreated.pop(number, None)
        found = self._watches.get(number)
        if found is None:  # it was closed meanwhile
            return
        if found.qsize() >= MOST_WAITING:
            msg = f"{MOST_WAITING} messages of a watch were not taken"
            found.put_nowait(Retryable(msg))
            return
        found.put_nowait(message)
