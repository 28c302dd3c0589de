"""What a tracker is: a place that a job's settings, metrics and result go to, beside the job's storage; and
which points it lacks.

begin(run) ─► log(points), again and again, in the order of their steps ─► end(result)
close() instead, if it goes on elsewhere

All calls come from one thread. They may raise and take long: then the tracker is made anew, and gets what it
lacks. Each point is told once, when its value will not change any more:

synchronous: a step (a bucket of steps, in long jobs) once it is whole          evaluations: at once
measured, asynchronous: once there is a later one                                job over: all
A step that is trained again after a rollback was told; in synchronous jobs it has the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from master_service.core.state.series import Series, SeriesTable
from trireme_shared.protocol.metrics import EVALUATION, LOSS
from trireme_shared.protocol.records.job_choices import Tracker as Wanted


class Point(NamedTuple):
    """A metric's mean over the steps from `step` to `last_step` (mostly the same one), with the smallest and
    the largest value."""

    name: str
    step: int
    last_step: int
    value: float
    least: float
    most: float
    weight: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job. `id`: the same from its first start to its end, whoever leads it. `attempt`: how
    often somebody began to follow it. `parameters`: its settings, flat. `storage`: its files. `remembered`:
    what `remember` was last given, by whichever attempt."""

    job: str
    id: str
    attempt: int
    storage: str
    parameters: Mapping[str, str]
    wanted: Wanted
    remembered: Mapping[str, Any]
    remember: Callable[[Mapping[str, Any]], None]

    @property
    def tags(self) -> dict[str, str]:
        return {"trireme.job": self.job, "trireme.run": self.id, "trireme.attempt": str(self.attempt)}


class Tracker(Protocol):
    """Users' own have `log`, and of the others what they need."""

    def begin(self, run: Run) -> Mapping[str, int] | None:
        """Ready to log. By metric the first step that it does not have yet; None: it cannot tell, so the job
        remembers what was logged."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Each point once, unless a call before raised, or was cut off by the end of its process. They are
        there when it returns."""
        ...

    def end(self, result: Mapping[str, Any]) -> None:
        """The job has ended: `phase` (COMPLETED, FAILED, CANCELLED), `reason`, `metrics` of the last
        evaluation, and more of its result."""
        ...

    def close(self) -> None:
        """It is not used any more; the job may go on."""
        ...


LAST_STEP = 2**62


def new_points(
    table: SeriesTable, known: int, told: Mapping[str, int], most: int, *, over: bool
) -> list[Point]:
    """At most `most`, in the order of their steps. `known`: whole steps before this one are stored. `told`:
    by metric the first step that was not told. `over`: nothing will come any more."""
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
        Point(name, row.first, row.last, row.mean, row.value.least, row.value.most, row.value.weight)
        for row in rows
    ]


def _end(name: str, series: Series, known: int) -> int:
    """Steps before this one have their last value."""
    if series.ordered:
        return known
    return LAST_STEP if name.startswith(EVALUATION) else _last(series) - series.width + 1


def _last(series: Series) -> int:
    return max((bucket.step for bucket in series), default=-1) + series.width - 1 if len(series) else -1
