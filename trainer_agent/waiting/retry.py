"""One loop for all retries: growing pauses, a time limit, and a log line about what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import DeadlineExceeded, PeerError
from shared.runtime import clock, ids, telemetry

FIRST_S, CEILING_S = 0.05, 2.0
LIMIT_S = 600.0
NOTICE_S = 10.0

T = TypeVar("T")
log = telemetry.logger("retry")


def backoff_s(failures: int) -> float:
    """Seconds before the next try after `failures` (>= 1) in a row; the caller adds jitter."""
    return min(CEILING_S, FIRST_S * 2.0 ** min(failures - 1, 16))


class Backoff:
    """For one operation: `await failed(error)` after each failure. It sleeps, and raises DeadlineExceeded once failures have
    followed each other for `limit_s`."""

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
        """Somebody is still computing what is waited for. That may take any time, so the limit starts again."""
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
