"""What trainers report of loss and speed, in bounded memory: sums per epoch, the last steps, records of the last seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme_shared.protocol.records import MetricBatch

KEPT_STEPS = 1000
KEPT_EPOCHS = 1000
WINDOW_S = 15.0


@dataclass(slots=True)
class Sums:
    """`loss_sum`: of loss x records. `skipped`: records left out, see StepMetrics."""

    loss_sum: float = 0.0
    records: int = 0
    skipped: int = 0

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.records if self.records else None


@dataclass(slots=True)
class Metrics:
    """`step`: how many steps were done: the highest number that was reported, and one, since they are numbered from 0; None: not known."""

    steps: OrderedDict[int, Sums] = field(default_factory=OrderedDict)
    epochs: OrderedDict[int, Sums] = field(default_factory=OrderedDict)
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    step: int | None = None
    records: int = 0
    skipped: int = 0
    moved_at: float = float("-inf")  # when records or the end of a task were last reported

    def add(self, batch: MetricBatch, now: float) -> None:
        """In place. Reports of several trainers about one step add up; a whole step counts once."""
        records = 0
        for share in batch.steps:
            if batch.whole and self.step is not None and share.step < self.step:
                continue
            for sums in (
                _entry(self.steps, share.step, KEPT_STEPS),
                _entry(self.epochs, share.epoch, KEPT_EPOCHS),
            ):
                sums.loss_sum += share.loss_sum
                sums.records += share.records
                sums.skipped += share.skipped
            records += share.records
            self.skipped += share.skipped
            self.step = max(self.step or 0, share.step + 1)
        self.records += records
        if records:
            self.moved_at = now
        self.recent.append((now, records))
        self._forget(now)

    def know_epochs(self, losses: Mapping[int, tuple[float, float]]) -> None:
        """In place: loss x records and records of whole steps by epoch, also of those that another master was told."""
        skipped = {number: sums.skipped for number, sums in self.epochs.items()}
        self.epochs.clear()
        for number in sorted(losses)[-KEPT_EPOCHS:]:
            loss_sum, records = losses[number]
            self.epochs[number] = Sums(loss_sum, round(records), skipped.get(number, 0))

    def know_steps(self, losses: Mapping[int, tuple[float, float]]) -> None:
        """Take loss x records and records of whole steps that the job was restored to, by step. In place."""
        for number in sorted(losses):
            known = self.steps.get(number, Sums())
            self.steps[number] = Sums(losses[number][0], round(losses[number][1]), known.skipped)
            self.steps.move_to_end(number)
        while len(self.steps) > KEPT_STEPS:
            self.steps.popitem(last=False)

    def rate(self, now: float) -> float:
        """Records per second over the last WINDOW_S; 0 while unknown."""
        self._forget(now)
        if len(self.recent) < 2:
            return 0.0
        first = self.recent[0]
        seconds = max(now - first[0], 1e-3)
        return (sum(records for _, records in self.recent) - first[1]) / seconds

    def records_from(self, step: int) -> int:
        """Records of the steps after version `step`, as far as they were reported and are kept."""
        return sum(sums.records for number, sums in self.steps.items() if number >= step)

    def rewind(self, step: int) -> None:
        """In place. The job continues from version `step`: later steps are trained again."""
        for number in [number for number in self.steps if number >= step]:
            del self.steps[number]
        self.step = step
        self.recent.clear()

    def _forget(self, now: float) -> None:
        while self.recent and (self.recent[0][0] < now - WINDOW_S or len(self.recent) > 4096):
            self.recent.popleft()


def _entry(kept: OrderedDict[int, Sums], key: int, limit: int) -> Sums:
    sums = kept.setdefault(key, Sums())
    while len(kept) > limit:
        kept.popitem(last=False)
    return sums
