"""How long an operation of a native group may take: what steps took here, many times over, and never less than a floor.

no step was measured ─► MOST_S          steps are measured ─► TIMES x the longest of the last, between FLOOR_S and MOST_S
an operation ran out of time ─► twice as long, until a step is finished

Members compute beside the operations of others, so too short a limit would break groups of members that are only slow; a broken group costs milliseconds.
"""

from __future__ import annotations

from collections import deque

FLOOR_S, MOST_S = 10.0, 300.0
TIMES = 10.0
REMEMBERED = 32


class OperationLimit:
    """Of one trainer. `seconds`: the limit at present."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._ran_out = 0

    def __repr__(self) -> str:
        return f"<OperationLimit: {self.seconds:g} s after {len(self._steps)} steps>"

    @property
    def seconds(self) -> float:
        if not self._steps:
            return MOST_S
        usual = max(FLOOR_S, TIMES * max(self._steps))
        return min(MOST_S, usual * 2.0**self._ran_out)

    def took(self, seconds: float) -> None:
        """A step was finished in that time."""
        self._steps.append(seconds)
        self._ran_out = 0

    def broke(self, after_s: float) -> None:
        """An operation failed so long after the step began."""
        if after_s >= self.seconds < MOST_S:
            self._ran_out += 1
