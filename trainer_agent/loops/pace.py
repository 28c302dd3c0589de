"""How fast this trainer computes: seconds for one lane, and for all its lanes of a step until they are acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from shared.runtime import clock

KEPT = 16
ENOUGH = 3  # the first minibatches compile, allocate, warm up
FRESH_S = 10.0


class Pace:
    """Medians of the last KEPT: one hiccup changes nothing."""

    def __init__(self) -> None:
        self._lanes: deque[float] = deque(maxlen=KEPT)
        self._least: deque[float] = deque(maxlen=KEPT)
        self._shares: deque[float] = deque(maxlen=KEPT)
        self._since: float | None = None
        self._measured_at = self._least_at = 0.0

    def __repr__(self) -> str:
        return f"<Pace: {self.lane_s} s a lane, {self.share_s} s a step>"

    @contextmanager
    def lane(self, counts: bool) -> Iterator[None]:
        """Around forward and backward of one lane, which `counts` if it has records. Without records, or if it is given up before
        its end, a whole one would have taken longer."""
        self._since = since = clock.monotonic()
        ended = False
        try:
            yield
            ended = True
        finally:
            self._since, now = None, clock.monotonic()
            if counts and (ended or self._lanes):
                least_s = 0.0 if ended else median(self._lanes)
                self._lanes.append(max(now - since, least_s))
                self._measured_at = now
            else:
                self._least.append(now - since)
                self._least_at = now

    def share_done(self, seconds: float) -> None:
        """All lanes of a step were computed and acknowledged."""
        self._shares.append(seconds)

    @property
    def lane_s(self) -> float | None:
        """None: not known yet, or not measured for FRESH_S. A lane under way counts as soon as it takes longer than usual."""
        return self._median(self._lanes, self._measured_at)

    @property
    def least_lane_s(self) -> float | None:
        """A lane with records would take at least so long, by those without records and those given up. It may take much longer."""
        return self._median(self._least, self._least_at)

    def _median(self, measured: deque[float], at: float) -> float | None:
        now = clock.monotonic()
        if len(measured) < ENOUGH or (self._since is None and now - at > FRESH_S):
            return None
        under_way = now - self._since if self._since is not None else 0.0
        return max(median(measured), under_way) or None

    @property
    def share_s(self) -> float | None:
        """None: not known yet."""
        return median(self._shares) if len(self._shares) >= ENOUGH else None
