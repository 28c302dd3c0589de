"""Jittered exponential pauses between attempts."""

from __future__ import annotations

from shared.runtime import ids

FIRST_S = 0.05
LAST_S = 1.0


class Backoff:
    """`next()` gives the pause before the next attempt: doubling from 50 ms to 1 s, each cut by up to half."""

    __slots__ = ("_pause_s",)

    def __init__(self) -> None:
        self._pause_s = FIRST_S

    def next(self) -> float:
        pause = ids.jitter(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LAST_S)
        return pause

    def reset(self) -> None:
        self._pause_s = FIRST_S
