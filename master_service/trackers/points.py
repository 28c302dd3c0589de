"""Which points of a job's series a tracker does not have yet. Each is told once, when its value will not change any more.

synchronous: a step (a bucket of steps, in long jobs) once it is whole          evaluations: at once
measured, asynchronous: once there is a later one                                job over: all
A step that is trained again after a rollback was told; in synchronous jobs it has the same value.
"""

from __future__ import annotations

from collections.abc import Mapping

from master_service.core.state.series import Series, SeriesTable
from master_service.trackers.tracker import Point
from trireme_shared.protocol.metrics import EVALUATION, LOSS

LAST_STEP = 2**62


def new_points(table: SeriesTable, known: int, told: Mapping[str, int], most: int, *, over: bool) -> list[Point]:
    """At most `most`, in the order of their steps. `known`: whole steps before this one are stored. `told`: by metric the first step
    that was not told. `over`: nothing will come any more."""
    found = [
        point
        for name, series in table.by_name.items()
        for point in _of(name, series, told.get(name, 0), most)
        if over or point.last_step < _end(name, series, known)
    ]
    found.sort(key=lambda point: (point.step, point.name))
    return found[:most]


def told_with(told: Mapping[str, int], points: list[Point]) -> dict[str, int]:
    """After these were told."""
    after = dict(told)
    for point in points:
        after[point.name] = max(after.get(point.name, 0), point.last_step + 1)
    return after


def behind(table: SeriesTable, told: Mapping[str, int]) -> int:
    """How many steps a tracker lacks at the end of the loss."""
    loss = table.by_name.get(LOSS)
    return max(0, _last(loss) + 1 - told.get(LOSS, 0)) if loss else 0


def _of(name: str, series: Series, first: int, most: int) -> list[Point]:
    rows = series.points(first, LAST_STEP, LAST_STEP, 0, None)
    rows = [row for row in rows if row.first >= first][:most]
    return [
        Point(name, row.first, row.last, row.mean, row.value.least, row.value.most, row.value.weight) for row in rows
    ]


def _end(name: str, series: Series, known: int) -> int:
    """Steps before this one have their last value."""
    if series.ordered:
        return known
    return LAST_STEP if name.startswith(EVALUATION) else _last(series) - series.width + 1


def _last(series: Series) -> int:
    return max((bucket.step for bucket in series), default=-1) + series.width - 1 if len(series) else -1
