"""What a trainer's coroutines wait with: retries, groups of tasks with one error, and work that comes to its
end.

retry, Backoff      growing pauses, a time limit, and a log line about what is waited for
SingleErrorGroup    one error out of a TaskGroup: the one that decides what the caller does next
end_tasks           tasks that were cancelled have ended, also those that forget it
to_its_end          the work ends before anything else happens, whatever happens to whoever waits for it
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    Gone,
    PeerError,
    TriremeError,
    UserCodeError,
    leaves,
)

FIRST_S, CEILING_S = 0.05, 2.0
LIMIT_S = 600.0
NOTICE_S = 10.0
CANCEL_AGAIN_S = 0.5

T = TypeVar("T")
log = telemetry.logger("waiting")


def backoff_s(failures: int) -> float:
    """Seconds before the next try after `failures` (>= 1) in a row; the caller adds jitter."""
    return min(CEILING_S, FIRST_S * 2.0 ** min(failures - 1, 16))


class Backoff:
    """Pauses between the tries of one operation: `await failed(error)` after each failure. It sleeps, and
    raises DeadlineExceeded once failures have followed each other for `limit_s`."""

    def __init__(self, what: str, limit_s: float = LIMIT_S) -> None:
        self._what, self._limit_s = what, limit_s
        self.reset()

    def reset(self) -> None:
        """There was progress: the next failure counts as the first."""
        self._failures = 0
        self._failing_since: float | None = None
        self._began = self._noticed = clock.monotonic()

    async def failed(self, error: object) -> None:
        now = clock.monotonic()
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since > self._limit_s:
            raise DeadlineExceeded(
                f"gave up after {now - self._failing_since:.0f} s: {self._what}; the last answer: {error}",
                hint="is that process alive and reachable from here?",
            )
        self._notice(error, now)
        await asyncio.sleep(ids.jitter(backoff_s(self._failures)))

    def waited(self, cause: object) -> None:
        """Somebody is still computing what is waited for. That may take any time, so the limit starts
        again."""
        self._failing_since = None
        self._notice(cause, clock.monotonic())

    def _notice(self, cause: object, now: float) -> None:
        if now - self._noticed > NOTICE_S:
            self._noticed = now
            log.warning("still_trying", what=self._what, seconds=round(now - self._began), cause=str(cause))


async def retry(call: Callable[[], Awaitable[T]], what: str, limit_s: float = LIMIT_S) -> T:
    """`await call()`, again after each PeerError. Raises every other error, and DeadlineExceeded."""
    backoff = Backoff(what, limit_s)
    while True:
        try:
            return await call()
        except PeerError as error:
            await backoff.failed(error)


class SingleErrorGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the most serious error of its tasks instead of an ExceptionGroup. If it is
    cancelled from outside in the moment in which a task or its own code fails, it is cancelled, whatever the
    error is: asyncio's own raises the error (until Python 3.13), and whoever tries again after such an error
    would never end. What is no TriremeError is logged then, since nobody else learns of it."""

    _parent_cancel_requested: bool  # of asyncio.TaskGroup: it has cancelled whoever runs it
    _parent_task: asyncio.Task[object] | None

    async def __aenter__(self) -> Self:
        self._cancels = _cancels()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken_back = self._parent_cancel_requested  # by asyncio itself
        try:
            return await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            failed = most_serious(group.with_traceback(None))
        del error, trace
        context = failed.__context__
        try:
            if sys.version_info < (3, 13) and self._parent_cancel_requested and not taken_back:
                _take_back()  # whoever waits at the end of the group is cancelled by it when a task fails
            if _cancels() > self._cancels:
                if not isinstance(failed, TriremeError):
                    log.warning("failed_while_cancelled", cause=repr(failed))
                raise asyncio.CancelledError from failed
            raise failed
        finally:
            failed.__context__ = context
            self._parent_task = None  # as Python 3.13 does
            # an error that refers to itself keeps all that its frames have, until Python looks for circles
            del failed, context


def _cancels() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _take_back() -> None:
    """One request to the running task to end."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def most_serious(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that decides; a bug (no TriremeError) comes first. The others are its cause, if it has
    none."""
    error = max(leaves(group), key=_seriousness)
    others = group.subgroup(lambda each: each is not error and not isinstance(each, BaseExceptionGroup))
    if error.__cause__ is None and others is not None:
        error.__cause__ = others
    return error


def _seriousness(error: BaseException) -> tuple[bool, ...]:
    known = isinstance(error, TriremeError)
    return (
        not known,
        isinstance(error, UserCodeError),
        isinstance(error, Gone),
        not isinstance(error, PeerError),
    )


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, again and again until they have ended. What they raise stays with them.

    Until Python 3.13 a TaskGroup that is cancelled forgets the cancellation if one of its tasks fails at that
    moment: the error is raised in place of CancelledError, and whoever handles the error goes on. A trainer
    of a job that has failed then reported its own error to a master that was gone.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


async def to_its_end(work: Awaitable[T]) -> T:
    """Await `work` to completion even if the caller is cancelled, then re-raise the cancellation: the work
    may be a thread that writes to the caller's memory."""
    working = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(working)
    finally:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
