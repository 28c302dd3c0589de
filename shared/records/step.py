"""The state of training beside the parameters: positions of the lanes' readers, scheduler and optimizer options."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shared.records.record import Record


class LanePosition(Record):
    """Position of a lane's reader: `offset` records of the task at `index` of the lane's stream are consumed.

    `exhausted`: the lane has no record left in `epoch`.
    """

    lane: int
    epoch: int = 0
    index: int = 0
    offset: int = 0
    exhausted: bool = False


class CheckpointAsked(Record):
    """A requested checkpoint (attempt `attempt` of the operation), due at `version`, decided by lane 0's owner in `generation`."""

    operation: str
    attempt: int
    generation: int
    version: int


class LaneZero(Record):
    """State that lane 0 carries for all lanes. `options[g]`: numeric options (lr, betas, …) of optimizer group g in this step.
    `scheduler`: state of the learning-rate scheduler after this step, with the options it set."""

    options: tuple[dict[str, Any], ...]
    scheduler: dict[str, Any] = Field(default_factory=dict)
    asked: CheckpointAsked | None = None


class StepRecord(Record):
    """What a version has beside its blocks: the readers' positions and lane 0's state after the step that made it. `grad_norm`: of
    the gradient that made it, before it was clipped (None: the job does not clip)."""

    version: int
    positions: tuple[LanePosition, ...]
    lane_zero: LaneZero | None = None
    grad_norm: float | None = None

    @property
    def asked(self) -> CheckpointAsked | None:
        return self.lane_zero.asked if self.lane_zero is not None else None
