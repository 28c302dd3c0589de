"""The state of training beside the parameters: positions of the lanes' readers, scheduler and optimizer
options; and what a step gave: its loss and what the script logged, added up along the canonical tree over its
lanes.

lane's minibatch ─► NodeResult, pushed with a node's first block
    ─► the tree, completed by each parameter server ─► StepResult

The tree fixes the order of additions, as it does for gradients: who computed which lanes changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from pydantic import Field

from trireme_shared.protocol.lanes import Interval, intervals
from trireme_shared.protocol.metrics import MOST_NAMES
from trireme_shared.protocol.records.record import Record


class LanePosition(Record):
    """Position of a lane's reader: `offset` records of the task at `index` of the lane's stream are consumed.

    `exhausted`: the lane has no record left in `epoch`.
    """

    lane: int = Field(description="Number of the lane.")
    epoch: int = 0
    index: int = 0
    offset: int = 0
    exhausted: bool = Field(default=False, description="The lane has no record left in this epoch.")


class CheckpointAsked(Record):
    """A requested checkpoint (attempt `attempt` of the operation), due at `version`, decided by lane 0's
    owner in `generation`."""

    operation: str
    attempt: int
    generation: int
    version: int


class LaneZero(Record):
    """State that lane 0 carries for all lanes. `options[g]`: numeric options (lr, betas, …) of optimizer
    group g in this step. `scheduler`: state of the learning-rate scheduler after this step, with the options
    it set. `number`: of the step if nothing else tells it: in asynchronous jobs, where it is the number of a
    push, or of an epoch with `schedule_per` epoch. `options_change`: that of the
    spec with which the step was made (JobSpec.options_change)."""

    options: tuple[dict[str, Any], ...]
    scheduler: dict[str, Any] = Field(default_factory=dict)
    asked: CheckpointAsked | None = None
    number: int = Field(default=0, ge=0)
    options_change: int = Field(default=0, ge=0)

    def learning_rates(self) -> tuple[float, ...]:
        """Of each of the first MOST_NAMES groups; empty if an optimizer has none."""
        found = [options.get("lr") for options in self.options[:MOST_NAMES]]
        rates = [float(rate) for rate in found if isinstance(rate, int | float) and math.isfinite(rate)]
        return tuple(rates) if len(rates) == len(found) else ()


Sums = tuple[float, float, float, float]
"""Of one name: the sum of the values, how much they weigh, the smallest and the largest."""


ParameterNumbers = tuple[Interval, ...]
"""Parameters by their numbers in the layout, as intervals [first, last) that ascend."""


class LaneSums(Record):
    """Of some lanes of a step: loss x records, records, records left out because they were not finite, and
    what was logged."""

    loss_sum: float = 0.0
    records: int = 0
    skipped: int = 0
    metrics: dict[str, Sums] = Field(default_factory=dict)


class NodeResult(LaneSums):
    """Of some lanes of a step, as it is pushed: with the parameters that it leaves as they are."""

    #: The parameters that had no gradient in the step, because they required none. None: not known, as of
    # lanes without records.
    frozen: ParameterNumbers | None = None
    #: The parameters that have had no gradient yet, or none since they began to require one. None: see
    # `frozen`.
    unused: ParameterNumbers | None = None
    #: The parameters of the optimizers that have no loss in the step; all lanes agree on them.
    resting: ParameterNumbers = ()


class StepResult(LaneSums):
    """Of all lanes of a step. `lr`: learning rate of each group in it. `grad_norm`: of its whole gradient, if
    that is known. What is not finite is left out."""

    step: int
    epoch: int
    lr: tuple[float, ...] = ()
    grad_norm: float | None = None


class StepRecord(Record):
    """What a version has beside its blocks: the readers' positions and lane 0's state after the step that
    made it. `grad_norm`: of the gradient that made it, before it was clipped (None: the job does not clip).
    `result`: of that step, unless some of it did not come. `results`: in checkpoints, of the steps before
    whose metrics may not be stored yet. `schedules`: of asynchronous jobs, see ScheduleStates."""

    version: int
    positions: tuple[LanePosition, ...]
    lane_zero: LaneZero | None = None
    grad_norm: float | None = None
    result: StepResult | None = None
    results: tuple[StepResult, ...] = ()
    schedules: tuple[LaneZero, ...] = ()
    #: Which parameters were left as they were in the step that made this version, see NodeResult. None: no
    # lane has told it until now, so it is as at first.
    frozen: ParameterNumbers | None = None
    unused: ParameterNumbers | None = None
    resting: ParameterNumbers = ()

    @property
    def left_alone(self) -> ParameterNumbers:
        """The parameters that the step which made this version has left as they were."""
        kinds = [numbers for numbers in (self.frozen, self.unused, self.resting) if numbers]
        if len(kinds) < 2:
            return kinds[0] if kinds else ()
        return tuple(intervals(sorted({number for numbers in kinds for number in numbers_in(numbers)})))

    @property
    def asked(self) -> CheckpointAsked | None:
        return self.lane_zero.asked if self.lane_zero is not None else None


def numbers_in(numbers: ParameterNumbers) -> Iterator[int]:
    """One by one, ascending."""
    return chain.from_iterable(range(*each) for each in numbers)


def is_among(number: int, numbers: ParameterNumbers) -> bool:
    return any(first <= number < last for first, last in numbers)


def joined(left: NodeResult, right: NodeResult) -> NodeResult:
    """Of both halves of a node. More than MOST_NAMES names: those that come first in the alphabet."""
    names = sorted(left.metrics.keys() | right.metrics.keys())[:MOST_NAMES]
    return NodeResult.model_construct(
        loss_sum=left.loss_sum + right.loss_sum,
        records=left.records + right.records,
        skipped=left.skipped + right.skipped,
        metrics={name: _added(left.metrics.get(name), right.metrics.get(name)) for name in names},
        frozen=right.frozen if left.frozen is None else left.frozen,
        unused=unused_in((left, right)),
        resting=right.resting if left.frozen is None else left.resting,
    )


def unused_in(results: Iterable[NodeResult]) -> ParameterNumbers | None:
    """The parameters that are unused in all lanes of these results; None: no lane had records."""
    found: set[int] | None = None
    for result in results:
        if result.records:
            own = set(numbers_in(result.unused or ()))
            found = own if found is None else found & own
    return None if found is None else tuple(intervals(sorted(found)))


def _added(left: Sums | None, right: Sums | None) -> Sums:
    if left is None or right is None:
        found = left or right
        assert found is not None
        return found
    return left[0] + right[0], left[1] + right[1], min(left[2], right[2]), max(left[3], right[3])


def result_of(node: Interval, results: Mapping[Interval, NodeResult]) -> NodeResult | None:
    """Of a node out of those of nodes within it; None if some are missing."""
    if (found := results.get(node)) is not None:
        return found
    first, last = node
    if last - first < 2:
        return None
    middle = (first + last) // 2
    left = result_of((first, middle), results)
    right = result_of((middle, last), results) if left is not None else None
    return joined(left, right) if left is not None and right is not None else None


def step_result(
    found: NodeResult, step: int, epoch: int, lr: tuple[float, ...], grad_norm: float | None = None
) -> StepResult:
    finite = math.isfinite(found.loss_sum)
    return StepResult.model_construct(
        step=step,
        epoch=epoch,
        lr=lr,
        grad_norm=grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None,
        loss_sum=found.loss_sum if finite else 0.0,
        records=found.records if finite else 0,
        skipped=found.skipped,
        metrics={name: sums for name, sums in found.metrics.items() if all(map(math.isfinite, sums))},
    )
