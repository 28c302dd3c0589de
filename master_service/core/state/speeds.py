"""How fast trainers compute, as they report it: in the memory of the leader. A new leader hears it again within seconds."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds for one lane, and what it takes at least; when that was reported."""

    lane_s: float | None
    least_lane_s: float | None
    at: float


@dataclass(slots=True)
class Speeds:
    """`reports`: the last one of each trainer."""

    reports: dict[str, Report] = field(default_factory=dict)

    def note(self, trainer: str, lane_s: float | None, least_lane_s: float | None, now: float) -> None:
        """In place. A report of nothing leaves what is known."""
        if lane_s is not None or least_lane_s is not None:
            self.reports[trainer] = Report(lane_s, least_lane_s, now)

    def keep(self, trainers: Container[str], since: float) -> None:
        """In place. Reports of others, and those from before `since`, are forgotten."""
        for trainer in [name for name, report in self.reports.items() if name not in trainers or report.at < since]:
            del self.reports[trainer]

    @property
    def lane_s(self) -> dict[str, float]:
        """Trainer -> seconds for one lane. Lanes without records say of a trainer only that it is no faster than so: it is taken to
        be like the others, or as slow as that."""
        measured = [report.lane_s for report in self.reports.values() if report.lane_s is not None]
        usual_s = median(measured) if measured else None
        found = {name: _expected_s(report, usual_s) for name, report in self.reports.items()}
        return {name: lane_s for name, lane_s in found.items() if lane_s is not None}


def _expected_s(report: Report, usual_s: float | None) -> float | None:
    known_s = report.lane_s if report.lane_s is not None else usual_s
    return None if known_s is None else max(known_s, report.least_lane_s or 0.0)
