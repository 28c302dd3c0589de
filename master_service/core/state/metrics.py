"""What trainers report of loss and speed, in the bounded memory of a leader: sums per epoch, the last steps,
records of the last seconds, and how fast each trainer computes. A new leader hears of speeds again within
seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

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
    """`step`: how many steps were done: the highest number that was reported, and one, since they are
    numbered from 0; None: not known."""

    steps: OrderedDict[int, Sums] = field(default_factory=OrderedDict)
    epochs: OrderedDict[int, Sums] = field(default_factory=OrderedDict)
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    step: int | None = None
    records: int = 0
    skipped: int = 0
    moved_at: float = float("-inf")  # when records or the end of a task were last reported

    @property
    def loss(self) -> float | None:
        """Mean of the newest epoch, of what was told of it; None: nothing was."""
        last = next(reversed(self.epochs.values()), None)
        return last.loss if last is not None else None

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
        """In place: loss x records and records of whole steps by epoch, also of those that another master was
        told."""
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


REPORTS = 64  # of one trainer, at most
SPEED_WINDOW_S = 10.0
"""A trainer's speed is the median of what it reported in so long. One report is the median of a few lanes:
with looks that follow each other faster than this, lanes would move by noise."""


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds for one lane, and what it takes at least; when that was reported."""

    lane_s: float | None
    least_lane_s: float | None
    at: float


@dataclass(slots=True)
class Speeds:
    """`reports`: of each trainer, those of the WINDOW_S before its last one, oldest first."""

    reports: dict[str, deque[Report]] = field(default_factory=dict)

    def note(self, trainer: str, lane_s: float | None, least_lane_s: float | None, now: float) -> None:
        """In place. A report of nothing leaves what is known."""
        if lane_s is not None or least_lane_s is not None:
            found = self.reports.setdefault(trainer, deque(maxlen=REPORTS))
            found.append(Report(lane_s, least_lane_s, now))
            while found[0].at < now - SPEED_WINDOW_S:
                found.popleft()

    def keep(self, trainers: Container[str], since: float) -> None:
        """In place. Reports of others, and those from before `since`, are forgotten."""
        for trainer in [
            name for name, found in self.reports.items() if name not in trainers or found[-1].at < since
        ]:
            del self.reports[trainer]

    @property
    def lane_s(self) -> dict[str, float]:
        """Trainer -> seconds for one lane. Lanes without records say of a trainer only that it is no faster
        than so: it is taken to be like the others, or as slow as that."""
        usual = {name: _usual(found) for name, found in self.reports.items()}
        measured = [report.lane_s for report in usual.values() if report.lane_s is not None]
        usual_s = median(measured) if measured else None
        found = {name: _expected_s(report, usual_s) for name, report in usual.items()}
        return {name: lane_s for name, lane_s in found.items() if lane_s is not None}


def _usual(found: deque[Report]) -> Report:
    """The median of a trainer's reports. What its last one does not know is not known."""
    last = found[-1]
    lane_s = None if last.lane_s is None else _median(each.lane_s for each in found)
    least_s = None if last.least_lane_s is None else _median(each.least_lane_s for each in found)
    return Report(lane_s, least_s, last.at)


def _median(values: Iterable[float | None]) -> float:
    return median(value for value in values if value is not None)


def _expected_s(report: Report, usual_s: float | None) -> float | None:
    known_s = report.lane_s if report.lane_s is not None else usual_s
    return None if known_s is None else max(known_s, report.least_lane_s or 0.0)
