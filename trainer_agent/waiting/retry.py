"""Patience with peers: one loop for all retries, bounded, and it says what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import DeadlineExceeded, PeerError
from shared.runtime import clock, ids, telemetry
from trainer_agent.waiting.pacing import backoff_s

PATIENCE_S = 600.0
NOTICE_S = 10.0

T = TypeVar("T")
log = telemetry.logger("retry")


class Patience:
    """One endeavour: `await failed(error)` after each failure sleeps, and raises DeadlineExceeded when it took too long."""

    def __init__(self, what: str, limit_s: float = PATIENCE_S) -> None:
        self._what, self._limit_s = what, limit_s
        self.reset()

    def reset(self) -> None:
        """There was progress: the next failure is the first again."""
        self._failures = 0
        self._since = self._noticed = clock.monotonic()

    async def failed(self, error: object) -> None:
        self._failures += 1
        self.waited(error)
        await asyncio.sleep(ids.jitter(backoff_s(self._failures)))

    def waited(self, error: object) -> None:
        """The peer itself let us wait: no pause, but no endless patience either. Raises DeadlineExceeded."""
        now = clock.monotonic()
        if now - self._since > self._limit_s:
            raise DeadlineExceeded(
                f"gave up after {now - self._since:.0f} s: {self._what}; the last answer: {error}",
                hint="is that process alive and reachable from here?",
            )
        if now - self._noticed > NOTICE_S:
            self._noticed = now
            log.warning("still_trying", what=self._what, seconds=round(now - self._since), cause=str(error))


async def persist(call: Callable[[], Awaitable[T]], what: str, limit_s: float = PATIENCE_S) -> T:
    """`await call()`, again after each PeerError. Raises what is no PeerError, and DeadlineExceeded."""
    patience = Patience(what, limit_s)
    while True:
        try:
            return await call()
        except PeerError as error:
            await patience.failed(error)
