"""Metrics of the steps of a synchronous job: each step once and in order, whoever reports it and however often.

the next step ─► taken          an earlier one ─► known already          a later one ─► some are missing, they are asked for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from master_service.core.state.left_steps import LeftSteps, same_until
from master_service.core.state.series import SeriesTable, Value
from trireme_shared.protocol.metrics import GRADIENT_NORM, LOSS, NONFINITE, rate_names
from trireme_shared.protocol.records import StepMetrics
from trireme_shared.protocol.records.checkpoints import CheckpointRef

MOST_EPOCHS = 4096


@dataclass(slots=True)
class Epoch:
    """From step `first` on. `sums`: by name."""

    first: int
    sums: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class WholeSteps:
    """`next`: the first step that is not known. `timeline`: of the steps. `epochs`: the last ones. `left`: steps that the job left in restores."""

    next: int = 0
    timeline: int = 0
    epochs: dict[int, Epoch] = field(default_factory=dict)
    left: LeftSteps = field(default_factory=LeftSteps)

    def portion(self, steps: Sequence[StepMetrics], lost_before: int | None) -> list[StepMetrics]:
        """In place: those of `steps` that are next, up to the first gap; they are known from now on. What is kept nowhere is left out."""
        if lost_before is not None:
            self.next = max(self.next, lost_before)
        taken = []
        for share in sorted(steps, key=lambda share: share.step):
            if share.step > self.next:
                break
            if share.step == self.next:
                self.next += 1
                taken.append(share)
        return taken

    def count(self, share: StepMetrics, values: Sequence[tuple[str, Value]]) -> None:
        """In place: a step's values in its epoch."""
        sums = self.epochs.setdefault(share.epoch, Epoch(share.step)).sums
        for name, value in values:
            sums[name] = sums[name].plus(value) if name in sums else value
        while len(self.epochs) > MOST_EPOCHS:
            del self.epochs[min(self.epochs)]

    def rewind(self, step: int, table: SeriesTable) -> None:
        """In place: `step` is next again. The sums of its epoch are added up from `table`, which is rewound, too; where its buckets are wider
        than a step they may lack some steps at the epoch's begin."""
        end, self.next = self.next, min(self.next, step)
        table.rewind(step, end)
        if step < end:
            self._add_up(step, table)

    def follow(
        self, timeline: int, origin: int, before: int | None, kept: Sequence[CheckpointRef], table: SeriesTable
    ) -> int:
        """The job has gone to a checkpoint: its steps before `origin` are those on the way to timeline `before` (None: not known which that is), later
        ones are to come. In place; answers the first step whose metrics in `table` are other ones now. `kept`: the checkpoints to which the job may go
        later."""
        left, end = self.left, self.next
        left.learn(kept)
        way, wanted = left.path(self.timeline, end), left.path(before, origin)
        cut = same_until(way, wanted)
        left.take(table, cut, end)
        table.rewind(cut, end)
        self.next = left.give(table, cut, wanted)
        left.begins[timeline] = origin, before
        self.timeline = timeline
        left.epochs |= {number: epoch.first for number, epoch in self.epochs.items()}
        self._add_up(cut, table)
        left.forget(kept, timeline)
        return cut

    def _add_up(self, step: int, table: SeriesTable) -> None:
        """The sums of the epochs that have steps from `step` on, from `table`. In place."""
        for number in [number for number, epoch in self.epochs.items() if epoch.first >= step]:
            del self.epochs[number]
        firsts = {number: first for number, first in self.left.epochs.items() if step <= first < self.next}
        changed = [self.epochs[max(self.epochs)]] if self.epochs else []
        for number in sorted(firsts):
            self.epochs[number] = Epoch(firsts[number])
            changed.append(self.epochs[number])
        ends = [*(epoch.first for epoch in changed[1:]), self.next]
        for epoch, end in zip(changed, ends, strict=False):
            epoch.sums = {}
            for name, series in table.by_name.items():
                if series.ordered and (total := series.total(epoch.first, end)) is not None:
                    epoch.sums[name] = total


def values_of(share: StepMetrics, *, skips: bool) -> Iterator[tuple[str, Value]]:
    """By name. `skips`: minibatches that are not finite are left out, and counted."""
    if share.records:
        loss = share.loss_sum / share.records
        yield LOSS, Value(share.loss_sum, share.records, loss, loss)
    for name, value in share.metrics.items():
        yield name, Value(value.total, value.weight, value.least, value.most)
    for name, rate in zip(rate_names(len(share.lr)), share.lr, strict=True):
        yield name, Value(rate, 1, rate, rate)
    if (norm := share.grad_norm) is not None:
        yield GRADIENT_NORM, Value(norm, 1, norm, norm)
    if skips:
        yield NONFINITE, Value(share.skipped, 1, share.skipped, share.skipped)
