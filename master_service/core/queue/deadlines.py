"""How long a task may be silent: a high quantile of the observed silences, times a factor, between a floor and a ceiling.

A silence is the time between two signs of life of one attempt: dispatch, each progress report, completion. That the first minibatch of a lane's task is
handed out tells nothing: its step is still to come. A trainer computes its lanes one after the other, so silences count for each of its lanes: who gets
the lanes of others may be silent for longer. The ceiling is that of a minibatch, and all wait for the trainer with the most lanes, so everybody's counts
for each of those. Otherwise a trainer that is left alone with many lanes would be evicted in every step, for ever, although no minibatch takes that long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from master_service.core.queue.open_tasks import Pending
from trireme_shared.protocol.records import TrainerList

WINDOW = 512
ENOUGH = 8
QUANTILE = 0.99
FACTOR = 4.0


@dataclass(slots=True)
class Deadlines:
    """`trainers`: who has which lanes."""

    floor_s: float
    ceiling_s: float
    trainers: TrainerList = field(default_factory=TrainerList)
    _seen: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def heard(self, held: Pending, now: float, *, by_lane: bool) -> None:
        """In place: more minibatches of a task were handed out. Before `held` says so."""
        if held.minibatches or not by_lane:
            self.observe(now - held.last_sign, held.record.trainer)

    def observe(self, silence_s: float, trainer: str = "") -> None:
        """In place, of a task at that trainer. The last WINDOW silences count."""
        silence_s /= self._lanes_of(trainer)
        if len(self._seen) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._seen.popleft())]
        self._seen.append(silence_s)
        insort(self._ordered, silence_s)

    def allowed_s(self, trainer: str = "") -> float:
        """At that trainer. The longest until ENOUGH silences were observed: a first batch may compile, download, warm up."""
        count, longest_s = len(self._ordered), self.ceiling_s * max(1, self.trainers.most_lanes)
        if count < ENOUGH:
            return longest_s
        high = self._ordered[min(count - 1, int(QUANTILE * count))]
        return min(longest_s, max(self.floor_s, FACTOR * high * self._lanes_of(trainer)))

    def is_over(self, held: Pending, now: float) -> bool:
        """Whether that task has been silent for too long, also if its trainer has got more lanes since the deadline was set."""
        return held.deadline < now and held.last_sign + self.allowed_s(held.record.trainer) < now

    def _lanes_of(self, trainer: str) -> int:
        """1 if it has none any more, and where tasks belong to no lanes."""
        first, end = self.trainers.lanes_of(trainer)
        return max(1, end - first)
