"""The network between simulated processes: what TCP does to requests, on virtual time and drawn from a seed.

    caller --request--> [delay, loss, partition] --> handler in the callee's process --reply--> [delay, loss]
        --> caller

A lost request was not executed, a lost reply was; both look like a reset connection. A partition holds
everything back until it heals (TCP retransmits), so what was sent before may arrive long after its sender
gave up. A dead process refuses connections and resets those it had; a frozen one accepts and is silent. A
doubled request is executed again later, and nobody hears the second answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.equipment.virtual_loop import Process, current_process
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError, from_map

RETRANSMIT_S = 0.2
STREAM_WINDOW = 4
"""Items of a stream under way; a sender further ahead waits, as it would for a full socket."""


@dataclass(frozen=True)
class Conditions:
    """Delays in seconds and chances per message (per stream for `break_stream`)."""

    low_s: float = 0.0002
    high_s: float = 0.002
    slow: float = 0.0
    slow_s: float = 1.0
    lose_request: float = 0.0
    lose_reply: float = 0.0
    double: float = 0.0
    break_stream: float = 0.0


STEADY = Conditions()


class _Call:
    """One request and its answer; `pipes` are its streams."""

    def __init__(self, source: Process, target: Process, reply: asyncio.Future[Any]) -> None:
        self.source, self.target, self.reply = source, target, reply
        self.pipes: list[Pipe] = []
        self.handler: asyncio.Task[Any] | None = None

    def fail(self, error: TriremeError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # the caller may be dead: nobody has to look


class Network:
    """All connections of one simulated cluster."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.conditions = STEADY
        self.counts: dict[str, int] = {}
        self.crashes: list[BaseException] = []
        self.closed = False
        self._listeners: dict[str, tuple[Process, Any]] = {}
        self._cuts: dict[frozenset[str], None] = {}
        self._calls: dict[int, _Call] = {}
        self._next = 0
        self._context = contextvars.Context()

    # ------------------------------------------------------------ topology

    def listen(self, url: str, process: Process, service: Any) -> None:
        self._listeners[url] = (process, service)

    def cut(self, one: Process, other: Process) -> None:
        self._cuts[frozenset((one.name, other.name))] = None

    def mend(self, one: Process, other: Process) -> None:
        self._cuts.pop(frozenset((one.name, other.name)), None)

    def mend_all(self) -> None:
        self._cuts.clear()

    def is_cut(self, one: Process, other: Process) -> bool:
        return bool(self._cuts) and frozenset((one.name, other.name)) in self._cuts

    async def refuses(self, url: str) -> bool:
        """The probe of `trireme_shared.platform.runtime.http.refuses_connections`: True only if the process
        at `url` is known to be dead."""
        listener, prober = self._listeners.get(url), current_process()
        await asyncio.sleep(self.delay())
        if listener is None:
            return True
        if prober is not None and self.is_cut(prober, listener[0]):
            await asyncio.sleep(1.0)
            return False
        return listener[0].dead

    def killed(self, process: Process) -> None:
        """Its kernel closes what it had open: callers of it see a reset, receivers of its streams see them
        break."""
        for call in list(self._calls.values()):
            if call.target is process:
                self.later(self.delay(), call.fail, PeerError(f"connection to {process.name} was reset"))
            elif call.source is process:
                for pipe in call.pipes:
                    self.later(
                        self.delay(), pipe.break_off, PeerError(f"connection from {process.name} was reset")
                    )

    def close(self) -> None:
        """From now on nobody hears anything: every call fails at once."""
        self.closed = True
        for call in self._calls.values():
            call.fail(PeerError("the simulation is over"))
            for pipe in call.pipes:
                pipe.break_off(PeerError("the simulation is over"))

    # ------------------------------------------------------------ messages

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def delay(self) -> float:
        conditions = self.conditions
        delay = self.rng.uniform(conditions.low_s, conditions.high_s)
        return delay + self.rng.random() * conditions.slow_s if self.chance(conditions.slow) else delay

    def later(self, delay: float, function: Callable[..., Any], *args: Any) -> None:
        asyncio.get_running_loop().call_later(delay, function, *args, context=self._context)

    async def call(
        self,
        url: str,
        invoke: Callable[[Any], Awaitable[Any]],
        *,
        timeout_s: float | None,
        pipes: tuple[Pipe, ...] = (),
        again: Callable[[Any], Awaitable[Any]] | None = None,
        hang_up_cancels: bool = False,
    ) -> Any:
        """Run `invoke(service)` in the process that listens at `url`; raises what it raised, PeerError or
        DeadlineExceeded. `again`: how a doubled request is executed (default: like the first time).
        `hang_up_cancels`: the server cancels the handler of a caller that is gone."""
        source = current_process()
        assert source is not None, "only processes speak"
        if self.closed or url not in self._listeners:
            await asyncio.sleep(self.delay())
            raise PeerError(f"{url} refused the connection")
        target, service = self._listeners[url]
        call = _Call(source, target, asyncio.get_running_loop().create_future())
        call.pipes = list(pipes)
        for pipe in pipes:
            pipe.ends = (source, target)
        self._next += 1
        number = self._next
        self._calls[number] = call
        self.count("requests")
        if self.chance(self.conditions.lose_request):
            self.count("lost requests")
            self.later(self.delay(), self._reset, call)
        else:
            self.later(self.delay(), self._arrive, call, service, invoke)
            if self.chance(self.conditions.double):
                self.count("doubled requests")
                late = self.delay() + self.rng.random() * self.rng.choice([0.1, 2.0, 15.0])
                self.later(late, self._arrive_again, target, service, again or invoke)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.reply
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{target.name} gave no answer within {timeout_s:g} s", silent_s=timeout_s
            ) from error
        finally:
            self._calls.pop(number, None)
            if call.reply.cancelled() or not call.reply.done() or call.reply.exception() is not None:
                for pipe in pipes:
                    pipe.break_off(PeerError(f"{source.name} closed the connection"))
                if hang_up_cancels:
                    self.later(self.delay(), self._hang_up, call)

    def _reset(self, call: _Call) -> None:
        for pipe in call.pipes:
            pipe.break_off(PeerError("connection was reset"))
        call.fail(PeerError(f"connection to {call.target.name} was reset"))

    def _arrive(self, call: _Call, service: Any, invoke: Callable[[Any], Awaitable[Any]]) -> None:
        if call.target.dead:
            self.later(self.delay(), call.fail, PeerError(f"{call.target.name} refused the connection"))
        elif self.is_cut(call.source, call.target):
            self.later(RETRANSMIT_S, self._arrive, call, service, invoke)
        else:
            call.handler = call.target.spawn(self._serve(call, service, invoke))

    def _hang_up(self, call: _Call) -> None:
        if call.handler is not None and not self.is_cut(call.source, call.target):
            call.handler.cancel()

    def _arrive_again(self, target: Process, service: Any, invoke: Callable[[Any], Awaitable[Any]]) -> None:
        if not target.dead:
            target.spawn(self._serve(None, service, invoke))

    async def _serve(self, call: _Call | None, service: Any, invoke: Callable[[Any], Awaitable[Any]]) -> None:
        result: Any = None
        failure: TriremeError | None = None
        try:
            result = await invoke(service)
        except TriremeError as error:
            failure = from_map(error.to_map())
        except Exception as error:  # what a web server turns into a 500 is a bug here
            self.crashes.append(error)
            failure = PeerError(f"answered 500: {error!r}")
        if call is not None:
            self._answer(call, result, failure)

    def _answer(self, call: _Call, result: Any, failure: TriremeError | None) -> None:
        if self.chance(self.conditions.lose_reply):
            self.count("lost replies")
            self.later(self.delay(), self._reset, call)
        else:
            self.later(self.delay(), self._return, call, result, failure)

    def _return(self, call: _Call, result: Any, failure: TriremeError | None) -> None:
        if self.is_cut(call.source, call.target):
            self.later(RETRANSMIT_S, self._return, call, result, failure)
        elif failure is not None:
            call.fail(failure)
        elif not call.reply.done():
            call.reply.set_result(result)


class Pipe:
    """One direction of a connection's stream: in order, each item after a drawn delay, at most STREAM_WINDOW
    under way.

    `copy` makes the bytes that travel; it is called when the item leaves the sender, which is when `put`
    returns: a sender that changes the memory of an item while `put` waits sends what it changed.
    """

    def __init__(self, network: Network, copy: Callable[[Any], Any]) -> None:
        self.network, self.copy = network, copy
        self.ends: tuple[Process, Process] | None = None
        self.breaks_after = (
            network.rng.randrange(12) if network.chance(network.conditions.break_stream) else None
        )
        self.sent: list[Any] = []
        self._travelling: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._moving = False
        self.closed = False
        self.error: TriremeError | None = None
        self._changed = asyncio.Event()

    async def put(self, item: Any) -> None:
        while len(self._travelling) + len(self._arrived) >= STREAM_WINDOW and self.error is None:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.network.delay() / 4)
        if self.error is not None:
            raise self.error
        copied = self.copy(item)
        self.sent.append(copied)
        self._travelling.append(copied)
        self._move()
        if self.breaks_after is not None and len(self.sent) > self.breaks_after:
            self.network.count("broken streams")
            self.break_off(PeerError("connection was reset"))

    def close(self) -> None:
        self.closed = True
        self._notify()

    def break_off(self, error: TriremeError) -> None:
        """What is still travelling is lost; what has arrived can still be read."""
        if self.error is None and not (self.closed and not self._travelling):
            self.error = error
            self._travelling.clear()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()

    def _move(self) -> None:
        if not self._moving and self._travelling:
            self._moving = True
            self.network.later(self.network.delay(), self._deliver)

    def _deliver(self) -> None:
        if self.ends is not None and self.network.is_cut(*self.ends):
            self.network.later(RETRANSMIT_S, self._deliver)
            return
        self._moving = False
        if self._travelling:
            self._arrived.append(self._travelling.popleft())
            self._notify()
            self._move()

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        while True:
            if self._arrived:
                item = self._arrived.popleft()
                self._notify()
                yield item
            elif self.error is not None:
                raise self.error
            elif self.closed and not self._travelling:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


async def replay(pipe: Pipe) -> AsyncIterator[Any]:
    """What the pipe carried, once more; broken where it broke."""
    sent = 0
    while True:
        while sent < len(pipe.sent):
            await asyncio.sleep(pipe.network.delay())
            yield pipe.sent[sent]
            sent += 1
        if pipe.closed:
            return
        if pipe.error is not None:
            raise pipe.error
        await asyncio.sleep(0.1)


def conditions_of(rng: random.Random) -> Conditions:
    """A drawn climate: some runs are merely slow, some lose, some double, some do everything."""
    conditions = replace(STEADY, high_s=rng.choice([0.002, 0.01, 0.05]))
    if rng.random() < 0.5:
        conditions = replace(conditions, slow=rng.choice([0.005, 0.03]), slow_s=rng.choice([0.3, 2.0]))
    if rng.random() < 0.6:
        conditions = replace(
            conditions, lose_request=rng.choice([0.002, 0.02]), lose_reply=rng.choice([0.002, 0.02])
        )
    if rng.random() < 0.6:
        conditions = replace(conditions, double=rng.choice([0.01, 0.05]))
    if rng.random() < 0.5:
        conditions = replace(conditions, break_stream=rng.choice([0.01, 0.05]))
    return conditions
