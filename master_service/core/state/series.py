"""Metrics by step, in bounded memory: the losses of a job, and what its script reports.

report ─► Series.add: values of one step and timeline come together, those of a later timeline take the place
    of earlier ones
whole steps in their order ─► Series.append: each once
the job goes back ─► rewind: later steps are dropped, and come again
full ───► buckets twice as wide, so any number of steps fits
query ─► at most so many points

WholeSteps decides which steps of a synchronous job are new. LeftSteps has those that a restore of an older
checkpoint left.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trireme_shared.protocol.metrics import GRADIENT_NORM, LOSS, NONFINITE, is_own, rate_names
from trireme_shared.protocol.records import StepMetrics
from trireme_shared.protocol.records.checkpoints import CheckpointRef

MOST_BUCKETS = 8192  # of a series; half as many remain when buckets become wider
MOST_SERIES = 64  # of names that scripts choose


class Value(NamedTuple):
    """`total`: of the values x their weights; `weight`: records, or how many values; `least`, `most`: of the
    values."""

    total: float
    weight: float
    least: float
    most: float

    def plus(self, other: Value) -> Value:
        return Value(
            self.total + other.total,
            self.weight + other.weight,
            min(self.least, other.least),
            max(self.most, other.most),
        )


class Bucket(NamedTuple):
    """Steps from `step` on, as many as its series is wide. `timeline`: in which its values were computed (of
    whole steps: those of the first one)."""

    step: int
    timeline: int
    value: Value


class Point(NamedTuple):
    """The steps from `first` to `last`: their weighted mean, the smallest and the largest value."""

    first: int
    last: int
    value: Value

    @property
    def mean(self) -> float:
        return self.value.total / self.value.weight


class Series:
    """One metric. `width`: steps of each bucket. `ordered`: it has whole steps, by `append`. `covered`: steps
    before this one are in the last bucket already, though the job went back before them. Columns of numbers:
    48 bytes a bucket."""

    def __init__(self) -> None:
        self.width = 1
        self.ordered = False
        self.covered = 0
        self._steps, self._timelines = array("q"), array("q")
        self._columns = tuple(array("d") for _ in Value._fields)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Bucket]:
        """In the order of steps."""
        return (self._bucket(place) for place in range(len(self._steps)))

    def add(self, step: int, timeline: int, value: Value) -> None:
        """In place. What an earlier timeline says about steps that a later one has trained again does not
        count."""
        start = step - step % self.width
        place = bisect_left(self._steps, start)
        if place < len(self._steps) and self._steps[place] == start:
            known = self._timelines[place]
            if timeline >= known:
                self._set(
                    place, timeline, value if timeline > known else self._bucket(place).value.plus(value)
                )
            return
        self._steps.insert(place, start)
        self._timelines.insert(place, timeline)
        for column, number in zip(self._columns, value, strict=True):
            column.insert(place, number)
        if len(self._steps) > MOST_BUCKETS:
            self.widen(2 * self.width)

    def append(self, step: int, timeline: int, value: Value) -> None:
        """In place: the next step, or a later one."""
        self.ordered = True
        if step < self.covered:
            return
        start = step - step % self.width
        if self._steps and self._steps[-1] == start:
            last = self._bucket(len(self._steps) - 1)
            self._set(len(self._steps) - 1, last.timeline, last.value.plus(value))
            return
        self._steps.append(start)
        self._timelines.append(timeline)
        for column, number in zip(self._columns, value, strict=True):
            column.append(number)
        if len(self._steps) > MOST_BUCKETS:
            self.widen(2 * self.width)

    def rewind(self, step: int, end: int) -> None:
        """In place: steps from `step` to `end`, where the series ends, are trained again. Those of them that
        share a bucket with earlier ones stay; the same steps give the same values."""
        self.cut(step)
        self.cover(step, end)

    def cut(self, step: int) -> list[Bucket]:
        """Take out the buckets that begin at `step` or later, in place."""
        place = bisect_left(self._steps, step)
        taken = [self._bucket(each) for each in range(place, len(self._steps))]
        del self._steps[place:], self._timelines[place:]
        for column in self._columns:
            del column[place:]
        self.covered = min(self.covered, self._steps[-1] + self.width if self._steps else 0)
        return taken

    def cover(self, step: int, end: int) -> None:
        """The series goes on from `step`. Steps that its last bucket has beyond it, up to `end`, are not
        appended again. In place."""
        if self._steps and self._steps[-1] + self.width > step:
            self.covered = max(self.covered, min(self._steps[-1] + self.width, end))

    def total(self, first: int, end: int) -> Value | None:
        """The values of the buckets that begin in [first, end), together; None: there are none."""
        found: Value | None = None
        for place in range(bisect_left(self._steps, first), bisect_left(self._steps, end)):
            value = self._bucket(place).value
            found = found.plus(value) if found is not None else value
        return found

    def first(self) -> list[Bucket]:
        """The first bucket, if there is one."""
        return [self._bucket(0)] if self._steps else []

    def widen(self, width: int) -> None:
        """In place: buckets of at least so many steps (a power of two)."""
        if width <= self.width:
            return
        wider = Series()
        wider.width = width
        for bucket in self:
            wider.add(*bucket)
        self.width, self._steps, self._timelines, self._columns = (
            width,
            wider._steps,
            wider._timelines,
            wider._columns,
        )

    def points(self, first: int, last: int, most: int, timeline: int, done: int | None) -> list[Point]:
        """At most `most` of the steps in [first, last]. What an earlier timeline than `timeline` says of
        steps from `done` on is left out: they are to be trained again."""
        found = [
            self._bucket(place)
            for place in range(bisect_left(self._steps, first - first % self.width), len(self._steps))
            if self._steps[place] <= last
            and (done is None or self._steps[place] < done or self._timelines[place] >= timeline)
        ]
        if not found:
            return []
        start = found[0].step
        buckets = -(-(found[-1].step + self.width - start) // self.width)
        wide = self.width * -(-buckets // most)
        points: list[Point] = []
        for bucket in found:
            from_step = start + (bucket.step - start) // wide * wide
            ends = bucket.step + self.width - 1
            if points and points[-1].first >= from_step:
                before = points.pop()
                points.append(Point(before.first, ends, before.value.plus(bucket.value)))
            else:
                points.append(Point(bucket.step, ends, bucket.value))
        return points

    def _bucket(self, place: int) -> Bucket:
        value = Value(*(column[place] for column in self._columns))
        return Bucket(self._steps[place], self._timelines[place], value)

    def _set(self, place: int, timeline: int, value: Value) -> None:
        self._timelines[place] = timeline
        for column, number in zip(self._columns, value, strict=True):
            column[place] = number


@dataclass
class SeriesTable:
    """All metrics of a job, by name. `refused`: names for which there was no place."""

    by_name: dict[str, Series] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def add(self, name: str, step: int, timeline: int, value: Value, *, ordered: bool = False) -> bool:
        """In place; `ordered`: by Series.append. Whether there was a place: at most MOST_SERIES names are
        kept, and those that the job itself uses."""
        series = self.by_name.get(name)
        if series is None:
            if not is_own(name) and sum(not is_own(kept) for kept in self.by_name) >= MOST_SERIES:
                if len(self.refused) < MOST_SERIES:
                    self.refused.add(name)
                return False
            series = self.by_name[name] = Series()
        if ordered:
            series.append(step, timeline, value)
        else:
            series.add(step, timeline, value)
        return True

    def merge(self, other: SeriesTable) -> None:
        """In place."""
        for name, series in other.by_name.items():
            for number, bucket in enumerate(series):
                if self.add(name, *bucket, ordered=series.ordered) and not number:
                    self.by_name[name].widen(series.width)
            if name in self.by_name and series.ordered:
                self.by_name[name].covered = max(self.by_name[name].covered, series.covered)

    def rewind(self, step: int, end: int) -> None:
        """In place: of whole steps, see Series.rewind."""
        for name, series in list(self.by_name.items()):
            if series.ordered:
                series.rewind(step, end)
                if not len(series):
                    del self.by_name[name]


class Part(NamedTuple):
    """Steps from `first` until before `end` were made in `timeline`; None: nobody knows in which."""

    timeline: int | None
    first: int
    end: int


Path = tuple[Part, ...]


@dataclass(slots=True)
class LeftSteps:
    #: By timeline: its first step, and the timeline of the checkpoint that it began with (None: not known).
    """Metrics of steps that a job left when it was restored to an older checkpoint. A restore of a newer one
    brings them back.

    timeline 0: steps 0 ─► 50, checkpoints at 19 and 44
    restore of 19: timeline 1 begins at step 19          `take` keeps steps 19 to 50 of timeline 0 aside
    restore of 44: timeline 2 begins at step 44          `give` puts steps 19 to 44 of timeline 0 back, those
                                                         of timeline 1 are kept aside

    Steps are kept aside for as long as a checkpoint is kept that was made after them.
    """

    begins: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    #: By timeline: the metrics that were left in it.
    tables: dict[int, SeriesTable] = field(default_factory=dict)
    #: By timeline: its steps before this one were known.
    ends: dict[int, int] = field(default_factory=dict)
    #: By number of an epoch that was left: its first step.
    epochs: dict[int, int] = field(default_factory=dict)

    def learn(self, kept: Sequence[CheckpointRef]) -> None:
        """Note, in place, where the timelines of these checkpoints began: the job may not have reported any
        step in one of them."""
        refs = {ref.uuid: ref for ref in kept}
        for ref in kept:
            if ref.timeline and (not ref.origin or ref.origin in refs):
                origin = refs.get(ref.origin)
                self.begins.setdefault(
                    ref.timeline, (origin.step, origin.timeline) if origin is not None else (0, 0)
                )

    def path(self, timeline: int | None, end: int) -> Path:
        """The parts of the steps before `end` on the way to `timeline`, the first steps first."""
        parts: list[Part] = []
        while end > 0:
            if timeline is None or (timeline and timeline not in self.begins):
                parts.append(Part(None, 0, end))
                break
            first, before = self.begins.get(timeline, (0, 0))
            if first < end:
                parts.append(Part(timeline, first, end))
                end = first
            timeline = before
        return tuple(reversed(parts))

    def take(self, table: SeriesTable, first: int, end: int) -> None:
        """Move the buckets of whole steps from `first` on out of `table`, where steps end before `end`. In
        place."""
        for name, series in list(table.by_name.items()):
            if not series.ordered:
                continue
            for bucket in series.cut(first):
                kept = self.tables.setdefault(bucket.timeline, SeriesTable()).by_name.setdefault(
                    name, Series()
                )
                kept.widen(series.width)
                kept.add(*bucket)
                reached = min(bucket.step + series.width, end)
                self.ends[bucket.timeline] = max(self.ends.get(bucket.timeline, 0), reached)
            if not len(series):
                del table.by_name[name]

    def give(self, table: SeriesTable, first: int, path: Path) -> int:
        """Move buckets from `first` on back into `table`, which ends before it, as far as `path` goes. In
        place. Answers up to which step nothing is missing."""
        reached = first
        for part in path:
            while reached < part.end and (timeline := self._which(part, reached)) is not None:
                reached = self._move(timeline, table, reached, part.end)
            if reached < part.end:
                break
        return reached

    def _which(self, part: Part, step: int) -> int | None:
        """The timeline whose metrics of `step` are here, of those that the part allows."""
        allowed = sorted(self.tables, reverse=True) if part.timeline is None else [part.timeline]
        return next((timeline for timeline in allowed if self._holds(timeline, step)), None)

    def _holds(self, timeline: int, step: int) -> bool:
        """Whether the metrics of that step are here. A wide bucket that has it beside earlier steps was not
        moved here."""
        series = self.tables[timeline].by_name.values() if timeline in self.tables else ()
        begins = min(
            (bucket.step - each.width + 1 for each in series for bucket in each.first()), default=step + 1
        )
        return begins <= step < self.ends.get(timeline, 0)

    def _move(self, timeline: int, table: SeriesTable, first: int, end: int) -> int:
        left, reached = self.tables[timeline], min(end, self.ends[timeline])
        for name, kept in list(left.by_name.items()):
            series = table.by_name.setdefault(name, Series())
            series.widen(kept.width)
            later, moved = kept.cut(end), kept.cut(first)
            for bucket in moved:
                series.append(*bucket)
            series.cover(reached, self.ends[timeline])
            for bucket in later:
                kept.add(*bucket)
            for names, found in ((left, kept), (table, series)):
                if not len(found):
                    del names.by_name[name]
        if not left.by_name:
            del self.tables[timeline], self.ends[timeline]
        assert reached > first, f"no step after {first} was given back of timeline {timeline}"
        return reached

    def forget(self, kept: Sequence[CheckpointRef], timeline: int) -> None:
        """Drop what no kept checkpoint needs and the present `timeline` does not, in place."""
        parts = [part for ref in kept for part in self.path(ref.timeline, ref.step)]
        needed = {part.timeline for part in parts}
        if None not in needed:
            for left in list(self.tables):
                self._trim(left, max((part.end for part in parts if part.timeline == left), default=0))
        if not self.tables:
            self.epochs.clear()
        way = needed | {timeline} | {part.timeline for part in self.path(timeline, 1 << 62)}
        for begun in self.begins.keys() - way:
            del self.begins[begun]

    def _trim(self, timeline: int, end: int) -> None:
        """Nobody needs steps from `end` on."""
        by_name, width = self.tables[timeline].by_name, 1
        for name, series in list(by_name.items()):
            series.cut(end)
            width = max(width, series.width)
            if not len(series):
                del by_name[name]
        self.ends[timeline] = min(
            self.ends[timeline], -(-end // width) * width
        )  # the last bucket may go on beyond `end`
        if not by_name:
            del self.tables[timeline], self.ends[timeline]


def same_until(one: Path, other: Path) -> int:
    """The first step that the two ways made in different timelines, or with which one of them ends."""
    end = min(one[-1].end if one else 0, other[-1].end if other else 0)
    for step in sorted({part.first for part in (*one, *other)}):
        if step < end:
            mine, its = _at(one, step), _at(other, step)
            if mine is not None and its is not None and mine != its:
                return step
    return end


def _at(path: Path, step: int) -> int | None:
    return next((part.timeline for part in path if part.first <= step < part.end), None)


MOST_EPOCHS = 4096


@dataclass(slots=True)
class Epoch:
    """From step `first` on. `sums`: by name."""

    first: int
    sums: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class WholeSteps:
    """The steps of a synchronous job: each once and in order, whoever reports it and however often.

    the next step ─► taken
    an earlier one ─► known already
    a later one ─► some are missing, they are asked for

    `next`: the first step that is not known. `timeline`: of the steps. `epochs`: the last ones. `left`: steps
    that the job left in restores.
    """

    next: int = 0
    timeline: int = 0
    epochs: dict[int, Epoch] = field(default_factory=dict)
    left: LeftSteps = field(default_factory=LeftSteps)

    def portion(self, steps: Sequence[StepMetrics], lost_before: int | None) -> list[StepMetrics]:
        """In place: those of `steps` that are next, up to the first gap; they are known from now on. What is
        kept nowhere is left out."""
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
        """In place: `step` is next again. The sums of its epoch are added up from `table`, which is rewound,
        too; where its buckets are wider than a step they may lack some steps at the epoch's begin."""
        end, self.next = self.next, min(self.next, step)
        table.rewind(step, end)
        if step < end:
            self._add_up(step, table)

    def follow(
        self,
        timeline: int,
        origin: int,
        before: int | None,
        kept: Sequence[CheckpointRef],
        table: SeriesTable,
    ) -> int:
        """The job has gone to a checkpoint: its steps before `origin` are those on the way to timeline
        `before` (None: not known which that is), later ones are to come. In place; answers the first step
        whose metrics in `table` are other ones now. `kept`: the checkpoints to which the job may go later."""
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
