"""The only module that reads a clock. `monotonic` reads the running event loop's clock, so a virtual loop makes all time virtual."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime


def monotonic() -> float:
    """Seconds of the running event loop's clock (of the process where no loop runs); only differences mean anything."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def thread_seconds() -> float:
    """Processor time of the calling thread; only differences mean anything."""
    return time.thread_time()


def timestamp() -> str:
    """RFC 3339 UTC, for people; no decision reads it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_between(earlier: str, later: str) -> float:
    """Between two timestamps; negative if `later` is the earlier one."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def reader() -> Callable[[], float]:
    """The clock of the running loop, for code that reads it very often."""
    return asyncio.get_running_loop().time
