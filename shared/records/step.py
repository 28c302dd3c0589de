"""What one step of synchronous training leaves beside the parameters: where each lane's reader stands, and what lane 0 carries."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shared.records.record import Record


class LanePosition(Record):
    """Where a lane's reader stands: `offset` records of the task at `index` of the lane's stream are consumed.

    `exhausted`: the lane has no record left in `epoch`.
    """

    lane: int
    epoch: int = 0
    index: int = 0
    offset: int = 0
    exhausted: bool = False


class CheckpointAsked(Record):
    """A checkpoint on demand (the operation's n-th attempt): due at `version`, as said by lane 0's owner of `generation`."""

    operation: str
    attempt: int
    generation: int
    version: int


class LaneZero(Record):
    """What lane 0 carries for everybody. `options[g]`: numeric options (lr, betas, …) the optimizer groups had in this
    step; `scheduler`: the state of the learning-rate scheduler after this step, with the options it set."""

    options: tuple[dict[str, Any], ...]
    scheduler: dict[str, Any] = Field(default_factory=dict)
    asked: CheckpointAsked | None = None


class StepRecord(Record):
    """What a version carries beside its blocks: the readers' positions and lane 0's state after the step that made it."""

    version: int
    positions: tuple[LanePosition, ...]
    lane_zero: LaneZero | None = None

    @property
    def asked(self) -> CheckpointAsked | None:
        return self.lane_zero.asked if self.lane_zero is not None else None
