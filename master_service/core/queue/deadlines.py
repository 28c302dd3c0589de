"""How long a task may be silent: a high quantile of the observed silences, times a factor, between a floor and a ceiling.

A silence is the time between two signs of life of one attempt: dispatch, each progress report, completion.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

WINDOW = 512
ENOUGH = 8
QUANTILE = 0.99
FACTOR = 4.0


@dataclass(slots=True)
class Deadlines:
    floor_s: float
    ceiling_s: float
    _seen: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def observe(self, silence_s: float) -> None:
        """In place. The last WINDOW silences count."""
        if len(self._seen) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._seen.popleft())]
        self._seen.append(silence_s)
        insort(self._ordered, silence_s)

    def allowed_s(self) -> float:
        """The ceiling until ENOUGH silences were observed: a first batch may compile, download, warm up."""
        count = len(self._ordered)
        if count < ENOUGH:
            return self.ceiling_s
        high = self._ordered[min(count - 1, int(QUANTILE * count))]
        return min(self.ceiling_s, max(self.floor_s, FACTOR * high))
