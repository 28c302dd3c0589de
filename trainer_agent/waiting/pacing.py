"""How long to wait before trying again, and when metrics are worth a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.records import StepMetrics

FIRST_S, CEILING_S = 0.05, 2.0
FLUSH_S, FLUSH_STEPS, KEPT_STEPS = 0.5, 200, 2000


def backoff_s(failures: int) -> float:
    """Seconds before the next try after `failures` (>= 1) in a row; the caller adds jitter."""
    return min(CEILING_S, FIRST_S * 2.0 ** min(failures - 1, 16))


@dataclass
class MetricBuffer:
    """Steps not yet reported, one entry a step; bounded: the oldest go first when the master is away."""

    steps: dict[int, StepMetrics] = field(default_factory=dict)
    since: float = 0.0
    dropped: int = 0

    def add(self, share: StepMetrics, now: float) -> None:
        """In place. A second share of the same step is added to the first."""
        if not self.steps:
            self.since = now
        known = self.steps.get(share.step)
        if known:
            summed = {"loss_sum": known.loss_sum + share.loss_sum, "records": known.records + share.records}
            share = share.model_copy(update=summed)
        self.steps[share.step] = share
        if len(self.steps) > KEPT_STEPS:
            del self.steps[next(iter(self.steps))]
            self.dropped += 1

    def due_in(self, now: float) -> float | None:
        """Seconds until a report is due; None: nothing to report."""
        if not self.steps:
            return None
        return 0.0 if len(self.steps) >= FLUSH_STEPS else max(0.0, self.since + FLUSH_S - now)

    def take(self) -> tuple[StepMetrics, ...]:
        """In place: empties the buffer."""
        taken = tuple(self.steps.values())
        self.steps = {}
        return taken
