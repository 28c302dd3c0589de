"""Contains errors: a task that lasts as long as its process or its term goes on after an error that concerns
less than these.

Containment.keep(work): work() ─ raises ─► the log has it, `tell` too ─► a pause ─► work() again
                          │ └─ raises one of `ends` ─► raised: the group of tasks ends
                          └─ returns, or the task is cancelled ─► over
Containment.once(work): one attempt, of which an error is an answer
LongLivedGroup: tasks of which each error ends all, because none of them can go on without the others

A wait that somebody else has cancelled looks like the end of the task, and asyncio's groups go on without it
and say nothing. Here it is an error like others (Interrupted), unless the task itself was asked to end. The
pause doubles from error to error, and is short again after CALM_S without one.

Which error may end what is a table in ARCHITECTURE.md; tests/simulation/test_blast_radius.py holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.protocol.errors import PeerError, TriremeError, leaves

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CALM_S = 60.0
MOST_DOUBLINGS = 64  # a float has room for 1,024

T = TypeVar("T")
log = telemetry.logger("containment")


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row (from 1): `first_s`, each time twice as long as before,
    `longest_s` at most."""
    return min(longest_s, first_s * 2.0 ** min(max(failures - 1, 0), MOST_DOUBLINGS))


@dataclass(slots=True)
class Failures:
    """In a row, of one thing; one after CALM_S without any is the first again."""

    count: int = 0
    _last: float = 0.0

    def add(self, first_s: float, longest_s: float) -> float:
        """One more. Seconds to wait before the next attempt."""
        now = clock.monotonic()
        if now - self._last > longest_s + CALM_S:
            self.count = 0
        self.count, self._last = self.count + 1, now
        return backoff_s(self.count, first_s, longest_s)


class Interrupted(PeerError):
    """What a task waited for was cancelled by somebody else."""


@dataclass(frozen=True, slots=True)
class Failed:
    """`cause`: the error, for people."""

    cause: str


@dataclass(slots=True)
class Containment:
    """Of the tasks of one process or term. `ends`: errors by which that ends, also those in an
    ExceptionGroup. `tell` gets a sentence about an error; about one that comes again and again it gets ever
    fewer."""

    ends: tuple[type[Exception], ...] = ()
    tell: Callable[[str], object] = lambda _: None
    _notices: dict[str, Notices] = field(default_factory=dict)

    async def keep(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """`await work()` until it returns; after an error it is called again. `what` it does, for people:
        "deleting jobs". Raises errors of `ends`."""
        failures = Failures()
        while True:
            if not isinstance(await self.once(work, what), Failed):
                return
            await asyncio.sleep(ids.jitter(failures.add(FIRST_PAUSE_S, LONGEST_PAUSE_S)))

    async def once(self, work: Callable[[], Awaitable[T]], what: str) -> T | Failed:
        """What `work()` gives. Raises errors of `ends`."""
        try:
            return await uninterrupted(work())
        except (Exception, SystemExit) as error:  # of a library; the event loop would end with it
            if isinstance(error, self.ends):
                raise
            ending = error.subgroup(self.ends) if isinstance(error, BaseExceptionGroup) else None
            if ending is not None:
                raise ending from error
            return self._contain(what, error)

    def _contain(self, what: str, error: BaseException) -> Failed:
        told = isinstance(error, TriremeError | OSError)  # they say all that there is to say
        log.error("contained", what=what, cause=described(error), exc_info=None if told else error)
        if self._notices.setdefault(what, Notices()).due(clock.monotonic()):
            self.tell(f"{what} failed, and is tried again: {described(error)}")
        return Failed(described(error))


class LongLivedGroup(asyncio.TaskGroup):
    """A TaskGroup in which no task ends without notice: one whose wait is cancelled by somebody else raises
    Interrupted."""

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        assert isinstance(coro, Coroutine), f"{coro!r} cannot be a task"
        work = uninterrupted(coro)
        try:
            task = super().create_task(work, name=name, context=context)
        except BaseException:  # the group is over
            work.close()
            coro.close()
            raise
        task.add_done_callback(lambda _: coro.close())  # one that is cancelled at once never began it
        return task


async def uninterrupted(work: Awaitable[T]) -> T:
    """What `work` gives. Raises Interrupted where asyncio takes the task for one that was asked to end."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Interrupted("somebody else has cancelled what it waited for") from error


def described(error: BaseException) -> str:
    """`OSError: no route`; of a group its first error."""
    first = _all(error)[0]
    return f"{type(first).__name__}: {first}" if str(first) else type(first).__name__


def _all(error: BaseException) -> list[BaseException]:
    return list(leaves(error)) if isinstance(error, BaseExceptionGroup) else [error]
