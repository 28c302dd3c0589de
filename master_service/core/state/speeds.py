"""How fast trainers compute, as they report it: in the memory of the leader. A new leader hears it again within seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from statistics import median

REPORTS = 64  # of one trainer, at most
WINDOW_S = 10.0
"""A trainer's speed is the median of what it reported in so long. One report is the median of a few lanes: with looks that follow each
other faster than this, lanes would move by noise."""


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
            while found[0].at < now - WINDOW_S:
                found.popleft()

    def keep(self, trainers: Container[str], since: float) -> None:
        """In place. Reports of others, and those from before `since`, are forgotten."""
        for trainer in [name for name, found in self.reports.items() if name not in trainers or found[-1].at < since]:
            del self.reports[trainer]

    @property
    def lane_s(self) -> dict[str, float]:
        """Trainer -> seconds for one lane. Lanes without records say of a trainer only that it is no faster than so: it is taken to
        be like the others, or as slow as that."""
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
