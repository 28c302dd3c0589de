"""How fast trainers compute, as they report it: in the memory of the leader. A new leader hears it again within seconds."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field


@dataclass(slots=True)
class Speeds:
    """`reports`: trainer -> (seconds for one lane, when that was reported)."""

    reports: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, trainer: str, lane_s: float, now: float) -> None:
        """In place."""
        self.reports[trainer] = lane_s, now

    def keep(self, trainers: Container[str], since: float) -> None:
        """In place. Reports of others, and those from before `since`, are forgotten."""
        for trainer in [name for name, (_, at) in self.reports.items() if name not in trainers or at < since]:
            del self.reports[trainer]

    @property
    def lane_s(self) -> dict[str, float]:
        """Trainer -> seconds for one lane."""
        return {trainer: lane_s for trainer, (lane_s, _) in self.reports.items()}
