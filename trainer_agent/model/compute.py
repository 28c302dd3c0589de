"""What the training loops need of a model. `model.TorchCompute` is the real one; a simulation brings a tiny one.

    version s:  begin_step ─► per node, per lane: gradient ─► finished(block) ─► contribution(node, block) is pushed
    version s+1:  staging(block) filled by pulls ─► swap ─► current

The loops never see a tensor: blocks are memory (byte views), numbered as in `layout.blocks()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.lanes import Interval
from shared.records.job_spec import Narrow
from shared.records.layout import Layout
from shared.records.step import LaneZero

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LaneResult:
    """One minibatch done: sum of loss x records, and the records."""

    loss_sum: float
    records: int


class Compute(Protocol):
    """One trainer's model. Calls are never concurrent: the loop awaits `gradient`, `evaluate` and `export` one by one.

    What the user's code raises arrives as shared.errors.UserCodeError.
    """

    @property
    def layout(self) -> Layout: ...

    def current(self, block: int) -> memoryview:
        """Bytes of a block of the parameters in use; right after construction: the initial values of (model, seed)."""

    def staging(self, block: int) -> memoryview:
        """Writable bytes where a pull puts the block's next value."""

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        """The block's next value, which came in a narrower dtype, goes where a pull of its own dtype would have put it."""

    def swap(self) -> None:
        """The staging vector, complete, becomes the parameters in use; the old one becomes the staging vector."""

    def begin_step(self) -> LaneZero:
        """Once per global step, before its gradients: the options of this step, and the scheduler's state after it."""

    def initial_lane_zero(self) -> LaneZero:
        """What version 0 carries: the options the optimizer groups start with and the scheduler's first state."""

    def restore(self, lane_zero: LaneZero) -> None:
        """Scheduler and options as after the step that made a version; the next `begin_step` goes on from there. What
        casts of earlier gradients left out is forgotten."""

    async def gradient(
        self, node: Interval, lane: int, seed: int, records: Records | None, finished: Callable[[int], None]
    ) -> LaneResult:
        """Forward and backward of one minibatch (`None`: the lane is empty) with random numbers from `seed`.

        The lanes of a node [first, last) come in order, one call each. `finished(block)` is called in the event loop,
        exactly once per block, during the call for the last lane of the node, when backward has finished with the block
        (little ones may wait for others): from then on `contribution(node, block)` is the weighted mean over the node's lanes
        (shared.lanes.combine, canonical tree), cast to the dtype in which gradients travel. Cancelled, it returns only when no thread touches the vectors any more.
        """

    def contribution(self, node: Interval, block: int) -> memoryview:
        """Bytes of a finished block of a node, readable until `forget_nodes`; may be no bytes if no lane had records."""

    def forget_nodes(self) -> None:
        """All nodes may be overwritten from now on: their pushes are over, or the step is computed again."""

    async def evaluate(self, records: Records) -> dict[str, float]:
        """Sums over one minibatch, with the parameters in use, in evaluation mode."""

    async def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics out of the sums over the whole evaluation set."""

    async def export(self, directory: str) -> dict[str, str]:
        """Write the parameters in use below `directory` (path or fsspec URL); kind -> URL of each file."""
