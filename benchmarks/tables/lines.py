"""The lines of the table: what was measured, of whom, against which goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.spread import quartiles


@dataclass(frozen=True)
class Figure:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        text = _short(self.median)
        return text if self.low == self.high else f"{text} ({_short(self.low)}-{_short(self.high)})"


@dataclass
class Line:
    """`peers`: of each its figure, or why there is none. `goal`: of our figure, or of the ratio to the peer
    `over` if that is given. `higher`: is better. `note`: what else a reader must know."""

    row: str
    work: str
    unit: str
    ours: Figure | str
    peers: dict[str, Figure | str] = field(default_factory=dict)
    goal: float | None = None
    over: str = ""
    higher: bool = True
    note: str = ""

    def ratio(self, peer: str) -> float | None:
        """How many times better ours is."""
        theirs = self.peers.get(peer)
        if not isinstance(theirs, Figure) or not isinstance(self.ours, Figure):
            return None
        a, b = (self.ours.median, theirs.median) if self.higher else (theirs.median, self.ours.median)
        return a / b if b else None

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or nothing to compare with."""
        if self.goal is None or not isinstance(self.ours, Figure):
            return None
        if self.over:
            ratio = self.ratio(self.over)
            return None if ratio is None else ratio >= self.goal
        return self.ours.median >= self.goal if self.higher else self.ours.median <= self.goal

    @property
    def goal_text(self) -> str:
        if self.goal is None:
            return ""
        sign = ">=" if self.higher else "<="
        return f">= {self.goal:g} x {self.over}" if self.over else f"{sign} {_short(self.goal)}"

    def as_json(self) -> dict[str, Any]:
        def value(found: Figure | str) -> Any:
            if isinstance(found, Figure):
                return {"median": found.median, "quartiles": [found.low, found.high]}
            return found

        return {
            "row": self.row,
            "work": self.work,
            "unit": self.unit,
            "ours": value(self.ours),
            "peers": {name: value(found) for name, found in self.peers.items()},
            "ratios": {name: self.ratio(name) for name in self.peers},
            "goal": self.goal_text,
            "met": self.met,
            "note": self.note,
        }


HEAD = "| work | unit | ours | peers | ratio | goal | met |\n|---|---|---|---|---|---|---|"


def markdown(lines: Sequence[Line]) -> str:
    rows, notes = [HEAD], []
    for line in lines:
        peers = "; ".join(f"{name} {found}" for name, found in line.peers.items())
        ratios = ", ".join(
            f"{ratio:.2f} x {name}" for name in line.peers if (ratio := line.ratio(name)) is not None
        )
        met = {True: "yes", False: "NO", None: ""}[line.met]
        rows.append(
            f"| {line.work} | {line.unit} | {line.ours} | {peers} | {ratios} | {line.goal_text} | {met} |"
        )
        if line.note:
            notes.append(f"- {line.work}: {line.note}")
    return "\n".join([*rows, "", *notes] if notes else rows)


def figure(values: Sequence[float]) -> Figure:
    low, middle, high = quartiles(values)
    return Figure(middle, low, high)


def exactly(value: float) -> Figure:
    return Figure(value, value, value)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
