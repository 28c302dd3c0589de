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
    """For one operation: `await failed(error)` after each failure. It sleeps, and raises DeadlineExceeded after `limit_s`."""

    def __init__(self, what: str, limit_s: float = LIMIT_S) -> None:
        self._what, self._limit_s = what, limit_s
        self.reset()

    def reset(self) -> None:
        """There was progress: the next failure counts as the first."""
        self._failures = 0
        self._since = self._noticed = clock.monotonic()

    async def failed(self, error: object) -> None:
        self._failures += 1
        self.waited(error)
        await asyncio.sleep(ids.jitter(backoff_s(self._failures)))

    def waited(self, error: object) -> None:
        """The peer itself made us wait: no pause is needed, but the limit counts. Raises DeadlineExceeded."""
        now = clock.monotonic()
        if now - self._since > self._limit_s:
            raise DeadlineExceeded(
                f"gave up after {now - self._since:.0f} s: {self._what}; the last answer: {error}",
                hint="is that process alive and reachable from here?",
            )
        if now - self._noticed > NOTICE_S:
            self._noticed = now
            log.warning("still_trying", what=self._what, seconds=round(now - self._since), cause=str(error))


async def retry(call: Callable[[], Awaitable[T]], what: str, limit_s: float = LIMIT_S) -> T:
    """`await call()`, again after each PeerError. Raises every other error, and DeadlineExceeded."""
    backoff = Backoff(what, limit_s)
    while True:
        try:
            return await call()
        except PeerError as error:
            await backoff.failed(error)
