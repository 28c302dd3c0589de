"""What versions carry beside their blocks: where each lane's reader stands and lane 0's state, for the last few versions.

notes of step s (from push headers) --the first block completes step s--> StepRecord of version s + 1, fixed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import LanePosition, LaneZero, PushHeader, StepRecord

KEPT = 4


@dataclass(slots=True)
class Notes:
    positions: dict[int, LanePosition] = field(default_factory=dict)
    lane_zero: LaneZero | None = None


class History:
    def __init__(self, first: StepRecord) -> None:
        self._records = {first.version: first}
        self._notes: dict[int, Notes] = {}

    def __repr__(self) -> str:
        return f"<History of versions {sorted(self._records)}, notes of steps {sorted(self._notes)}>"

    def note(self, header: PushHeader) -> None:
        """A block took a push with this header: what it says of step `header.step` is true from now on."""
        if header.step + 1 in self._records:
            return
        notes = self._notes.setdefault(header.step, Notes())
        notes.positions.update((position.lane, position) for position in header.positions)
        notes.lane_zero = header.lane_zero or notes.lane_zero

    def lane_zero(self, step: int) -> LaneZero | None:
        """Lane 0's state after `step`, as far as it is known."""
        notes = self._notes.get(step)
        if notes is not None:
            return notes.lane_zero
        record = self._records.get(step + 1)
        return record.lane_zero if record else None

    def fix(self, version: int) -> None:
        """Some block has reached `version`, so everything about its step was noted."""
        if version in self._records:
            return
        notes = self._notes.pop(version - 1, Notes())
        positions = tuple(notes.positions[lane] for lane in sorted(notes.positions))
        self._records[version] = StepRecord(version=version, positions=positions, lane_zero=notes.lane_zero)
        while len(self._records) > KEPT:
            del self._records[min(self._records)]

    def record(self, version: int) -> StepRecord | None:
        return self._records.get(version)
