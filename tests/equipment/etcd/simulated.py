"""An etcd in memory, at the level of the transport: real semantics, virtual time, faults on demand, no I/O.

    client --request [delay]--> Store --answer [delay]--> client
    watches: events [delay], progress every second
      stop / start      connections reset, data kept, leases come back with their full TTL
      freeze / thaw     SIGSTOP: nothing answers, watches are silent; what was sent may be applied at the thaw
      cut / mend        the same for one client
      lose_answer, lose_request, unknown_rate     writes whose outcome the client cannot know

Deterministic: time is the running loop's, chance is the `rng` given. It is trusted only where the conformance
suite shows that a real etcd behaves the same.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.equipment.etcd.leases import Lessor
from tests.equipment.etcd.store import STORE_METHODS, Store
from trireme_shared.platform.etcd.errors import Refused, Retryable, unanswered
from trireme_shared.platform.etcd.operations import (
    GRANT,
    KEEP_ALIVE,
    REVOKE,
    TIME_TO_LIVE,
    WATCH,
    Body,
    WatchEvent,
    covers,
    is_write,
    prefix_end,
)
from trireme_shared.protocol.errors import TriremeError

PROGRESS_INTERVAL_S = 1.0
_FIRST_LEASE = 0x694D_0000_0000_0000


class Chance(Protocol):
    """random.Random, or anything else that draws from [0, 1)."""

    def random(self) -> float: ...


class _Even:
    """No chance: always the middle."""

    def random(self) -> float:
        return 0.5


@dataclass
class _Watcher:
    client: str
    first: bytes
    end: bytes
    pending: list[Body] = field(default_factory=list)
    broken: bool = False
    forgotten: bool = False
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass
class _Request:
    """One call on its way. `answer` is None once the client has given up or the connection broke."""

    client: str
    method: str
    body: Body
    answer: asyncio.Future[Body] | None
    write: bool
    lose_answer: bool = False

    def finish(self, answer: Body) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: TriremeError) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # the client may be gone: nobody has to look


class SimulatedEtcd:
    """One etcd for any number of clients: `Etcd(simulated.transport("master"))`.

    `delay_s`: bounds of each one-way delay. `unknown_rate`: chance that the answer of a write (or the write
    itself) is lost. Both draw from `rng`.
    """

    def __init__(
        self,
        *,
        rng: Chance | None = None,
        delay_s: tuple[float, float] = (0.0, 0.0),
        unknown_rate: float = 0.0,
    ) -> None:
        self.delay_s = delay_s
        self.unknown_rate = unknown_rate
        self.store = Store()
        self.stopped = False
        self.frozen = False
        self.raft_term = 2
        self.calls = 0
        self.rng: Chance = rng or _Even()
        self._context = contextvars.Context()  # its timers belong to no client's process
        self._cut: dict[str, None] = {}
        self._held: list[_Request] = []
        self._in_flight: dict[int, _Request] = {}
        self._watchers: dict[int, _Watcher] = {}
        self._faults: list[tuple[str | None, str | None, bool]] = []
        self._published = 0
        self._number = 0
        self._lessor = Lessor(self.store, self._context, self._publish)

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "frozen" if self.frozen else "serving"
        return f"<SimulatedEtcd {state}: {self.store!r}, {len(self._watchers)} watches>"

    def transport(self, client: str) -> SimulatedTransport:
        """The transport of one client; the name is what `cut` and the losses refer to."""
        return SimulatedTransport(self, client)

    # ------------------------------------------------------------ for tests

    @property
    def revision(self) -> int:
        return self.store.revision

    def events(self) -> list[WatchEvent]:
        """Every event since the beginning, compacted or not: the truth."""
        return [WatchEvent.of(event) for event in self.store.history]

    def size_bytes(self, prefix: str) -> int:
        """Bytes of all keys and values under `prefix`."""
        first = prefix.encode()
        return self.store.size_bytes(first, prefix_end(first))

    @property
    def open_watches(self) -> int:
        return len(self._watchers)

    # ------------------------------------------------------------ faults

    def stop(self) -> None:
        """Killed: connections are reset and refused; the data stays."""
        self.stopped, self.frozen = True, False
        self._lessor.pause()
        for request in [*self._in_flight.values(), *self._held]:
            request.fail(unanswered("the simulated etcd was stopped", write=request.write))
        self._in_flight.clear()
        self._held.clear()
        for watcher in self._watchers.values():
            watcher.broken = True
            watcher.wake()

    def start(self) -> None:
        """Restarted on its data: a new raft term, and every lease has its full TTL again."""
        assert self.stopped, "start follows stop"
        self.stopped = False
        self.raft_term += 1
        self._lessor.refresh()
        self._lessor.resume()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        self._lessor.pause()

    def thaw(self) -> None:
        """SIGCONT: what was sent is executed, leases that ran out meanwhile expire."""
        self.frozen = False
        self._release()
        if not self.stopped:
            self._lessor.resume()

    def cut(self, client: str) -> None:
        """Nothing passes between this client and etcd; its connections stay open and silent."""
        self._cut[client] = None

    def mend(self, client: str) -> None:
        self._cut.pop(client, None)
        self._release()

    def disconnect(self, client: str) -> None:
        """Reset the client's connections (watches and calls in flight); it may connect again at once."""
        for number, request in list(self._in_flight.items()):
            if request.client == client:
                del self._in_flight[number]
                request.fail(unanswered("the connection was reset", write=request.write))
        for watcher in self._watchers.values():
            if watcher.client == client:
                watcher.broken = True
                watcher.wake()

    def forget(self, client: str) -> None:
        """etcd's end of the client's watches is gone without a word: the client is dead, or its connections
        were dropped."""
        for number, watcher in list(self._watchers.items()):
            if watcher.client == client:
                watcher.forgotten = True
                del self._watchers[number]

    def lose_answer(self, *, client: str | None = None, method: str | None = None) -> None:
        """The next write (of that client, of that method) is applied, its answer lost."""
        self._faults.append((client, method, True))

    def lose_request(self, *, client: str | None = None, method: str | None = None) -> None:
        """The next write (of that client, of that method) is lost before it is applied; the client cannot
        know."""
        self._faults.append((client, method, False))

    def expire_lease(self, lease: int) -> None:
        """As if its TTL were over."""
        self._lessor.revoke(lease)
        self._publish()

    # ------------------------------------------------------------ requests

    async def call(self, client: str, method: str, body: Body, timeout_s: float) -> Body:
        self.calls += 1
        write = is_write(method, body)
        request = _Request(client, method, body, asyncio.get_running_loop().create_future(), write)
        number = self._next_number()
        self._in_flight[number] = request
        delay = self.delay()
        if delay:
            self._later(delay, self._arrive, number, request)
        else:
            await asyncio.sleep(0)
            self._arrive(number, request)
        assert request.answer is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer
        except TimeoutError:
            msg = f"the simulated etcd gave no answer to {method} within {timeout_s:g} s"
            raise unanswered(msg, write=write) from None
        finally:
            request.answer = None
            self._in_flight.pop(number, None)

    def _arrive(self, number: int, request: _Request) -> None:
        if self.stopped:
            self._in_flight.pop(number, None)
            request.fail(Refused("the simulated etcd refused the connection"))
        elif self.frozen or request.client in self._cut:
            self._held.append(request)
        else:
            self.serve(request)

    def serve(self, request: _Request) -> None:
        lost = self._fault(request) if request.write else None
        if lost is False:
            request.fail(unanswered("the connection was reset before the write arrived", write=True))
            return
        try:
            answer = self._execute(request.method, request.body)
        except TriremeError as error:
            self._reply(request.fail, error)
            return
        self._publish()
        if lost:
            self._reply(
                request.fail, unanswered("the connection was reset after the write arrived", write=True)
            )
        else:
            self._reply(request.finish, answer)

    def _reply(self, function: Callable[..., None], value: Any) -> None:
        if delay := self.delay():
            self._later(delay, function, value)
        else:
            function(value)

    def _fault(self, request: _Request) -> bool | None:
        """True: lose the answer. False: lose the request. None: neither."""
        for index, (client, method, applied) in enumerate(self._faults):
            if client in {None, request.client} and method in {None, request.method}:
                del self._faults[index]
                return applied
        if self.unknown_rate and self.rng.random() < self.unknown_rate:
            return self.rng.random() < 0.5
        return None

    def _execute(self, method: str, body: Body) -> Body:
        if method in STORE_METHODS:
            answer = self.store.execute(method, body)
        elif method == GRANT:
            lease = body.get("ID", 0) or _FIRST_LEASE + self._next_number()
            answer = self._lessor.grant(lease, body["TTL"], self.rng.random())
        elif method == KEEP_ALIVE:
            answer = self._lessor.keep_alive(body["ID"])
        elif method == REVOKE:
            answer = self._lessor.revoke(body["ID"])
        else:
            assert method == TIME_TO_LIVE, f"the simulated etcd has no {method}"
            answer = self._lessor.time_to_live(body["ID"])
        answer["header"] = self.header()
        return answer

    def header(self) -> Body:
        return {"cluster_id": 1, "member_id": 1, "revision": self.store.revision, "raft_term": self.raft_term}

    def delay(self) -> float:
        low, high = self.delay_s
        return low + (high - low) * self.rng.random() if high > 0 else 0.0

    def _release(self) -> None:
        """Execute what was held back: also, at random, writes whose client has given up meanwhile."""
        if self.frozen or self.stopped:
            return
        held, self._held = self._held, []
        for request in held:
            if request.client in self._cut:
                self._held.append(request)
            elif request.answer is not None or (request.write and self.rng.random() < 0.5):
                self.serve(request)
        for watcher in self._watchers.values():
            watcher.wake()

    # ------------------------------------------------------------ watches

    def _publish(self) -> None:
        history = self.store.history
        if self._published == len(history):
            return
        events, self._published = history[self._published :], len(history)
        for watcher in self._watchers.values():
            mine = [event for event in events if covers(watcher.first, watcher.end, event["kv"]["key"])]
            if mine:
                watcher.pending.extend(mine)
                watcher.wake()

    async def watch(self, client: str, create: Body) -> AsyncGenerator[Body, None]:
        await asyncio.sleep(self.delay())
        if self.stopped:
            raise Retryable("the simulated etcd refused the connection")
        watcher = _Watcher(client, create["key"], create.get("range_end", b""))
        number = self._next_number()
        self._watchers[number] = watcher
        try:
            while self.silent(client) and not watcher.broken:
                await self._quiet(watcher)
            start = create.get("start_revision", 0) or self.store.revision + 1
            watcher.pending = self.store.events_since(start, watcher.first, watcher.end)
            if not watcher.broken:
                yield {"header": self.header(), "created": True}
            if start < self.store.compacted:
                yield {"header": self.header(), "canceled": True, "compact_revision": self.store.compacted}
                return
            while True:
                if not watcher.pending:
                    await self._quiet(watcher)
                if delay := self.delay():
                    await asyncio.sleep(delay)
                if watcher.broken:
                    raise Retryable("the connection to the simulated etcd was reset")
                if self.silent(client) or watcher.forgotten:
                    await self._quiet(watcher)
                    continue
                if watcher.pending:
                    events, watcher.pending = watcher.pending, []
                    yield {"header": self.header(), "events": events}
                elif create.get("progress_notify"):
                    yield {"header": self.header()}
        finally:
            self._watchers.pop(number, None)

    async def _quiet(self, watcher: _Watcher) -> None:
        """Until something happens or a progress notification is due."""
        loop = asyncio.get_running_loop()
        if watcher.broken:
            return
        watcher.waiter = waiter = loop.create_future()
        timer = loop.call_later(PROGRESS_INTERVAL_S, watcher.wake)
        try:
            await waiter
        finally:
            timer.cancel()
            watcher.waiter = None

    def silent(self, client: str) -> bool:
        return self.frozen or client in self._cut

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _later(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_later(delay, function, *args, context=self._context)


class SimulatedTransport:
    """One client's connection to a SimulatedEtcd."""

    def __init__(self, etcd: SimulatedEtcd, client: str) -> None:
        self._etcd = etcd
        self._client = client

    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        return await self._etcd.call(self._client, method, body, timeout_s)

    def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        assert method == WATCH, f"{method} is not a stream"
        return self._etcd.watch(self._client, body["create_request"])

    async def close(self) -> None:
        self._etcd.disconnect(self._client)
