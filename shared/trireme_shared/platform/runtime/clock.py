"""The only module that reads a clock, and waiting by it. `monotonic` reads the running event loop's clock, so
a virtual loop makes all time virtual.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime


def monotonic() -> float:
    """Seconds of the running event loop's clock (of the process where no loop runs); only differences mean
    anything."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def sleep(seconds: float) -> None:
    """Blocks the thread: for programs without an event loop."""
    time.sleep(seconds)


def since_boot() -> float:
    """As `monotonic`, but the time that the machine was suspended counts: for leases, which run out
    meanwhile."""
    return monotonic() + suspended_s()


def suspended_s() -> float:
    """For how long the machine was suspended since this process began, to a tenth of a second; 0 where no
    clock tells."""
    return round(_asleep() - _ASLEEP_BEFORE, 1)


def _asleep() -> float:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


_ASLEEP_BEFORE = _asleep()


def thread_seconds() -> float:
    """Processor time of the calling thread; only differences mean anything."""
    return time.thread_time()


def process_seconds() -> float:
    """Processor time of all threads of this process; only differences mean anything."""
    return time.process_time()


def timestamp() -> str:
    """RFC 3339 UTC, for people; no decision reads it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def wall_time() -> float:
    """Seconds since 1970, for what users give as a time of day; it may jump."""
    return time.time()


def seconds_between(earlier: str, later: str) -> float:
    """Between two timestamps; negative if `later` is the earlier one."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def reader() -> Callable[[], float]:
    """The clock of the running loop, for code that reads it very often."""
    return asyncio.get_running_loop().time


FIRST_NOTICE_S = 10.0
RAREST_NOTICE_S = 600.0


async def event_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Whether the event is set within `limit_s` (None: it is waited for as long as it takes)."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False


class Notices:
    """When to tell of something that lasts: at first, after FIRST_NOTICE_S, and then each time twice as late
    as before, but at least every RAREST_NOTICE_S."""

    def __init__(self) -> None:
        self._next: float | None = None
        self._pause_s = FIRST_NOTICE_S

    def due(self, now: float) -> bool:
        """It still lasts: whether to tell now."""
        if self._next is not None and now < self._next:
            return False
        self._pause_s = FIRST_NOTICE_S if self._next is None else min(2 * self._pause_s, RAREST_NOTICE_S)
        self._next = now + self._pause_s
        return True

    def over(self) -> bool:
        """It is over: whether it was told of."""
        told, self._next = self._next is not None, None
        return told
