"""Metrics by step, in bounded memory: the losses of a job, and what its script reports.

report ─► add: values of one step and timeline come together, those of a later timeline take the place of earlier ones
whole steps in their order ─► append: each once          the job goes back ─► rewind: later steps are dropped, and come again
full ───► buckets twice as wide, so any number of steps fits          query ─► at most so many points
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trireme_shared.protocol.metrics import is_own

MOST_BUCKETS = 8192  # of a series; half as many remain when buckets become wider
MOST_SERIES = 64  # of names that scripts choose


class Value(NamedTuple):
    """`total`: of the values x their weights; `weight`: records, or how many values; `least`, `most`: of the values."""

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
    """Steps from `step` on, as many as its series is wide. `timeline`: in which its values were computed (of whole steps: those of the first one)."""

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
    """One metric. `width`: steps of each bucket. `ordered`: it has whole steps, by `append`. `covered`: steps before this one are in the last
    bucket already, though the job went back before them. Columns of numbers: 48 bytes a bucket."""

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
        """In place. What an earlier timeline says about steps that a later one has trained again does not count."""
        start = step - step % self.width
        place = bisect_left(self._steps, start)
        if place < len(self._steps) and self._steps[place] == start:
            known = self._timelines[place]
            if timeline >= known:
                self._set(place, timeline, value if timeline > known else self._bucket(place).value.plus(value))
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
        """In place: steps from `step` to `end`, where the series ends, are trained again. Those of them that share a bucket with earlier
        ones stay; the same steps give the same values."""
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
        """The series goes on from `step`. Steps that its last bucket has beyond it, up to `end`, are not appended again. In place."""
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
        self.width, self._steps, self._timelines, self._columns = width, wider._steps, wider._timelines, wider._columns

    def points(self, first: int, last: int, most: int, timeline: int, done: int | None) -> list[Point]:
        """At most `most` of the steps in [first, last]. What an earlier timeline than `timeline` says of steps from `done` on is left out:
        they are to be trained again."""
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
        """In place; `ordered`: by Series.append. Whether there was a place: at most MOST_SERIES names are kept, and those that the job itself uses."""
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
