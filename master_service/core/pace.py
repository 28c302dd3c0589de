"""How long a task may be silent: a high quantile of the silences seen, times a factor, between a floor and a ceiling.

A silence is the time between two signs of life of one attempt: dispatch, each progress report, completion.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 512
ENOUGH = 8
QUANTILE = 0.99
FACTOR = 4.0


@dataclass(slots=True)
class Pace:
    floor_s: float
    ceiling_s: float
    silences: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, silence_s: float) -> None:
        self.silences.append(silence_s)

    def allowed_s(self) -> float:
        """The ceiling until ENOUGH silences were seen: a first batch may compile, download, warm up."""
        if len(self.silences) < ENOUGH:
            return self.ceiling_s
        ordered = sorted(self.silences)
        high = ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]
        return min(self.ceiling_s, max(self.floor_s, FACTOR * high))
