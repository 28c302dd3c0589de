"""Jittered exponential pauses between attempts."""

from __future__ import annotations

from collections.abc import Iterator

from trireme_shared.platform.runtime import ids

FIRST_S = 0.05
LAST_S = 1.0


def pauses() -> Iterator[float]:
    """The pause before each next attempt, in seconds: doubling from 50 ms to 1 s, each cut by up to half."""
    pause_s = FIRST_S
    while True:
        yield ids.jitter(pause_s)
        pause_s = min(2 * pause_s, LAST_S)
