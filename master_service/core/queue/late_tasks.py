"""Tasks that take longer than the usual, while nothing else is left to give: they are given to another trainer too.

A leader marks them in its own memory: nothing of it is stored, and a new leader measures anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from master_service.core.queue.open_tasks import Pending

WINDOW = 64
ENOUGH = 3
LEAST_S = 1.0
"""Shorter tasks are not worth a second trainer, and leaders look once a second."""


@dataclass(slots=True)
class LateTasks:
    """`durations`: seconds from dispatch to completion of the last tasks. `found`: those that were late, the longest first."""

    durations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    found: list[str] = field(default_factory=list)

    def observe(self, seconds: float) -> None:
        """In place: a task was completed so long after it was given out."""
        self.durations.append(seconds)

    def mark(self, pending: Mapping[str, Pending], now: float, factor: float) -> int:
        """In place: those given out more than `factor` times the median duration ago. Answers how many there are."""
        if len(self.durations) < ENOUGH:
            return 0
        limit_s = max(LEAST_S, factor * median(self.durations))
        late = sorted((held.since, task_id) for task_id, held in pending.items() if now - held.since > limit_s)
        self.found = [task_id for _, task_id in late]
        for task_id in self.found:
            pending[task_id].late = True
        return len(late)

    def first_for(self, pending: Mapping[str, Pending], trainer: str) -> str | None:
        """The task to give to that trainer too; none that it has, and none that was given again since it was marked."""
        for task_id in self.found:
            held = pending.get(task_id)
            if held is not None and held.late and not held.record.is_at(trainer):
                return task_id
        return None
