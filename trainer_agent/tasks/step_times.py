"""Where the time of a trainer's steps goes: computing, waiting for answers to its pushes, waiting for pulls.

a step: computing ─► pushed ─► pulled          reports: add (each step) ─► take (one record for many steps)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import StepTimes


@dataclass(slots=True)
class Times:
    """Seconds of a step, or of several. `waiting_since`: when it last computed, or its push was acknowledged; None: it does not wait."""

    compute: float = 0.0
    push: float = 0.0
    pull: float = 0.0
    waiting_since: float | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward."""
        self.pulled()
        began = clock.monotonic()
        try:
            yield
        finally:
            self.waiting_since = clock.monotonic()
            self.compute += self.waiting_since - began

    def pushed(self) -> None:
        """All that was computed is acknowledged."""
        if self.waiting_since is not None:
            now = clock.monotonic()
            self.push, self.waiting_since = self.push + now - self.waiting_since, now

    def pulled(self) -> None:
        """Since the push was acknowledged, or since the last gradient, the parameters were waited for."""
        if self.waiting_since is not None:
            self.pull += clock.monotonic() - self.waiting_since
            self.waiting_since = None


@dataclass(slots=True)
class TimesBuffer:
    """Steps that are not reported yet. Those before another timeline are dropped."""

    step: int = -1
    timeline: int = 0
    seconds: float = 0.0
    sums: Times = field(default_factory=Times)

    def add(self, step: int, timeline: int, seconds: float, times: Times) -> None:
        """In place."""
        if timeline != self.timeline:
            self.seconds, self.sums = 0.0, Times()
        self.step, self.timeline, self.seconds = step, timeline, self.seconds + seconds
        self.sums.compute += times.compute
        self.sums.push += times.push
        self.sums.pull += times.pull

    def take(self) -> StepTimes | None:
        """In place."""
        if not self.seconds:
            return None
        seconds, sums, self.seconds, self.sums = self.seconds, self.sums, 0.0, Times()
        return StepTimes(
            step=self.step,
            timeline=self.timeline,
            seconds=seconds,
            compute=sums.compute,
            push=sums.push,
            pull=sums.pull,
        )
