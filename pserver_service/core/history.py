"""What a version consists of beside its blocks: each lane's reader position and lane 0's state, for the last few versions.

notes of step s (from push headers) --the first block completes step s--> StepRecord of version s + 1, fixed

A lane's position says which records its data in the step comes from. All blocks must get data of the same records: `agrees`
compares. A task may be discarded after some blocks got its data; the trainer that goes on with the next task claims the lane
first, at all parameter servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.records.step import LanePosition, LaneZero, StepRecord
from shared.wire.messages import HandedHistory, HandedNotes, PushHeader

KEPT = 4


Positions = Mapping[int, LanePosition]


@dataclass(slots=True)
class Notes:
    """By lane. `positions`: of the data that blocks have. `first`: the trainer that it came from first. `claimed`: of the only data
    that blocks may get from now on. `grad_norm`: of the step's whole gradient, once it is known (jobs that clip)."""

    positions: dict[int, LanePosition] = field(default_factory=dict)
    first: dict[int, str] = field(default_factory=dict)
    claimed: dict[int, LanePosition] = field(default_factory=dict)
    lane_zero: LaneZero | None = None
    grad_norm: float | None = None


class History:
    """The step records of the last versions, and the notes of steps under way."""

    def __init__(self, first: StepRecord) -> None:
        self._records = {first.version: first}
        self._notes: dict[int, Notes] = {}
        self._first: dict[int, dict[int, str]] = {}  # by step, of the steps of `_records`
        self.claims = 0

    def __repr__(self) -> str:
        return f"<History of versions {sorted(self._records)}, notes of steps {sorted(self._notes)}>"

    def note(self, header: PushHeader, positions: Positions, lanes: Iterable[int]) -> None:
        """A block takes data of these lanes: the header's positions and lane 0's state hold for step `header.step` from now on."""
        if header.step + 1 in self._records:
            return
        notes = self._notes.setdefault(header.step, Notes())
        for lane in lanes:
            notes.positions[lane] = positions[lane]
            notes.first.setdefault(lane, header.trainer)
        notes.lane_zero = header.lane_zero or notes.lane_zero

    def first_from(self, trainer: str, step: int) -> tuple[int, ...]:
        """The lanes of a step under way, or of one of the last few, whose data came from that trainer first."""
        first = self._notes[step].first if step in self._notes else self._first.get(step, {})
        return tuple(sorted(lane for lane, name in first.items() if name == trainer))

    def agrees(self, step: int, positions: Positions, lanes: Iterable[int]) -> bool:
        """Whether blocks have, or may get, data of `lanes` with these positions in that step."""
        held = self._held(step)
        claimed = self._notes[step].claimed if step in self._notes else {}
        return all(positions[lane] == held.get(lane, claimed.get(lane, positions[lane])) for lane in lanes)

    def claim(self, step: int, positions: Positions) -> str:
        """Refuse other data of these lanes in that step from now on. Returns why that is too late, or ""."""
        held = self._held(step)
        for lane, position in positions.items():
            if (other := held.get(lane, position)) != position:
                return (
                    f"blocks have data of lane {lane} in step {step} up to task {other.index} of its stream, record {other.offset}, "
                    f"which was discarded since: it cannot be replaced by that up to task {position.index}, record {position.offset}"
                )
        if step + 1 not in self._records:
            self._notes.setdefault(step, Notes()).claimed.update(positions)
            self.claims += 1
        return ""

    def _held(self, step: int) -> dict[int, LanePosition]:
        """Positions of the data that blocks have in that step; nothing is known of old steps."""
        if (record := self._records.get(step + 1)) is not None:
            return {position.lane: position for position in record.positions}
        return self._notes[step].positions if step in self._notes else {}

    def lane_zero(self, step: int) -> LaneZero | None:
        """Lane 0's state after `step`, if it is known."""
        notes = self._notes.get(step)
        if notes is not None:
            return notes.lane_zero
        record = self._records.get(step + 1)
        return record.lane_zero if record else None

    def learn_norm(self, step: int, norm: float) -> None:
        """Of a step under way; the first one counts."""
        if step + 1 not in self._records:
            notes = self._notes.setdefault(step, Notes())
            notes.grad_norm = norm if notes.grad_norm is None else notes.grad_norm

    def norm(self, step: int) -> float | None:
        """The norm of the step's whole gradient, if it is known."""
        if step in self._notes:
            return self._notes[step].grad_norm
        record = self._records.get(step + 1)
        return record.grad_norm if record else None

    def fix(self, version: int) -> None:
        """A block has reached `version`, so the notes of its step are complete."""
        if version in self._records:
            return
        notes = self._notes.pop(version - 1, Notes())
        positions = tuple(notes.positions[lane] for lane in sorted(notes.positions))
        self._records[version] = StepRecord(
            version=version, positions=positions, lane_zero=notes.lane_zero, grad_norm=notes.grad_norm
        )
        self._first[version - 1] = notes.first
        while len(self._records) > KEPT:
            oldest = min(self._records)
            del self._records[oldest]
            self._first.pop(oldest - 1, None)

    def handed(self) -> HandedHistory:
        """What another parameter server needs to know as well when it gets blocks of this one."""
        notes = [
            HandedNotes(
                step=step,
                positions=tuple(notes.positions.values()),
                claimed=tuple(notes.claimed.values()),
                lane_zero=notes.lane_zero,
                grad_norm=notes.grad_norm,
            )
            for step, notes in sorted(self._notes.items())
        ]
        return HandedHistory(records=tuple(self._records[v] for v in sorted(self._records)), notes=tuple(notes))

    def take(self, handed: HandedHistory) -> None:
        """Know what another parameter server knows, whose blocks come here."""
        for record in handed.records:
            self._records.setdefault(record.version, record)
            self._notes.pop(record.version - 1, None)
        for each in handed.notes:
            if each.step + 1 in self._records:
                continue
            notes = self._notes.setdefault(each.step, Notes())
            for lane in each.positions:
                notes.positions.setdefault(lane.lane, lane)
            for lane in each.claimed:
                notes.claimed.setdefault(lane.lane, lane)
            notes.lane_zero = notes.lane_zero or each.lane_zero
            notes.grad_norm = each.grad_norm if notes.grad_norm is None else notes.grad_norm
        self.claims += 1
        while len(self._records) > KEPT:
            del self._records[min(self._records)]

    def record(self, version: int) -> StepRecord | None:
        return self._records.get(version)
