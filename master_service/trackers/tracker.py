"""What a tracker is: a place that a job's settings, metrics and result go to, beside the job's storage.

begin(run) ─► log(points), again and again, in the order of their steps ─► end(result)          close() instead, if it goes on elsewhere

All calls come from one thread. They may raise and take long: then the tracker is made anew, and gets what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trireme_shared.protocol.records.job_choices import Tracker as Wanted


class Point(NamedTuple):
    """A metric's mean over the steps from `step` to `last_step` (mostly the same one), with the smallest and the largest value."""

    name: str
    step: int
    last_step: int
    value: float
    least: float
    most: float
    weight: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job. `id`: the same from its first start to its end, whoever leads it. `attempt`: how often somebody began to follow
    it. `parameters`: its settings, flat. `storage`: its files. `remembered`: what `remember` was last given, by whichever attempt."""

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
        """Ready to log. By metric the first step that it does not have yet; None: it cannot tell, so the job remembers what was logged."""
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Each point once, unless a call before raised, or was cut off by the end of its process. They are there when it returns."""
        ...

    def end(self, result: Mapping[str, Any]) -> None:
        """The job has ended: `phase` (COMPLETED, FAILED, CANCELLED), `reason`, `metrics` of the last evaluation, and more of its result."""
        ...

    def close(self) -> None:
        """It is not used any more; the job may go on."""
        ...
