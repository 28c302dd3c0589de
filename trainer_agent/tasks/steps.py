"""Steps as the reports to the master tell them: where the time of a trainer's steps goes, and the whole steps
of the owner of lane 0.

Times        a step: computing ─► pushed ─► pulled
             reports: add (each step) ─► take (one record for many steps)
WholeSteps   pulled with a version ─► add ─► portion: from the first one that the master does not know
                 ─► heard: what it knows, what is stored
             a new owner, or a new master, lacks some ─► missing_from ─► parameter servers are asked ─► filled
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import MetricsTaken, StepMetrics, StepTimes
from trireme_shared.protocol.records.step import StepResult
from trireme_shared.protocol.records.tasks import MetricValue

MOST_STEPS = 4096


@dataclass(slots=True)
class Times:
    """Seconds of a step, or of several. `waiting_since`: when it last computed, or its push was acknowledged;
    None: it does not wait."""

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


class WholeSteps:
    """The steps that the owner of lane 0 tells the master, in order, until their metrics are stored.
    `stored`: metrics of steps before are stored. `missing_from`: the first step that the master lacks and
    that is not here; None: there is none. Bounded: the oldest are dropped while the master is away."""

    def __init__(self) -> None:
        self.timeline = -1
        self.clear()

    def __repr__(self) -> str:
        return (
            f"<WholeSteps {min(self._steps, default=self._end)} to {self._end}: told {self._told}, "
            f"stored {self.stored}>"
        )

    def clear(self) -> None:
        """This trainer does not own lane 0, or the job went back."""
        self._steps: dict[int, StepMetrics] = {}
        self._told = self._end = self.stored = 0
        self.missing_from: int | None = None
        self.lost_before: int | None = None

    @property
    def active(self) -> bool:
        """Whether there is anything to tell, or may be soon."""
        return bool(self._end)

    def stored_in(self, timeline: int) -> int:
        """Metrics of steps before are stored. 0 as long as none of that timeline is done here: after a
        roll-back steps come again."""
        return self.stored if timeline == self.timeline else 0

    @property
    def waiting(self) -> int:
        """How many steps the master was not told of."""
        return max(0, self._end - max(self._told, min(self._steps, default=self._end)))

    @property
    def tellable(self) -> bool:
        """Whether the master would take steps that it was not told of: it wants them in order, and has to get
        those that are missing here first."""
        return bool(self.waiting) and self.missing_from is None

    def add(self, result: StepResult | None, step: int, timeline: int) -> None:
        """In place: `step` is done. None: a part of its result did not come."""
        if timeline != self.timeline:
            self.clear()
            self.timeline = timeline
        if not self._end:
            self._told = step
        self._end = step + 1
        if result is not None:
            self._steps[step] = metrics_of_step(result, timeline)
        while len(self._steps) > MOST_STEPS:
            del self._steps[min(self._steps)]

    def reach(self, version: int, timeline: int) -> None:
        """In place: all steps before `version` are done, whoever owned lane 0."""
        if timeline != self.timeline:
            self.clear()
            self.timeline = timeline
        self._told = min(self._told, version) if self._end else version
        self._end = max(self._end, version)

    def portion(self, most: int, most_values: int) -> tuple[StepMetrics, ...]:
        """In place: the next ones, as many as a report takes."""
        taken: list[StepMetrics] = []
        values = 0
        for step in range(max(self._told, min(self._steps, default=self._end)), self._end):
            if len(taken) == most or values > most_values:
                break
            if (share := self._steps.get(step)) is not None:
                taken.append(share)
                values += len(share.metrics)
            self._told = step + 1
        return tuple(taken)

    def untold(self, steps: Sequence[StepMetrics]) -> None:
        """In place: a report did not arrive."""
        if steps:
            self._told = min(self._told, steps[0].step)

    def heard(self, taken: MetricsTaken, timeline: int) -> None:
        """In place: what the master says."""
        if timeline != self.timeline or taken.next is None:
            return
        self.lost_before = None
        self.stored = max(self.stored, taken.stored)
        for step in [step for step in self._steps if step < taken.stored]:
            del self._steps[step]
        self._told = max(taken.next, 0)
        self.missing_from = taken.next if taken.next < self._end and taken.next not in self._steps else None

    def filled(self, results: Iterable[StepResult], wanted: int) -> None:
        """In place: what a parameter server keeps from step `wanted` on. What nobody keeps is lost."""
        for result in results:
            if result.step < self._end:
                self._steps.setdefault(result.step, metrics_of_step(result, self.timeline))
        if self.missing_from == wanted:
            self.missing_from = None
            if wanted not in self._steps:
                self.lost_before = min((step for step in self._steps if step > wanted), default=self._end)
                self._told = self.lost_before


def metrics_of_step(result: StepResult, timeline: int) -> StepMetrics:
    return StepMetrics(
        step=result.step,
        epoch=result.epoch,
        timeline=timeline,
        loss_sum=result.loss_sum,
        records=result.records,
        skipped=result.skipped,
        metrics={
            name: MetricValue(total=total, weight=weight, least=least, most=most)
            for name, (total, weight, least, most) in result.metrics.items()
        },
        lr=result.lr,
        grad_norm=result.grad_norm,
    )
