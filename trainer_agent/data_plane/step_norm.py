"""The norm of a step's whole gradient, as one trainer finds it while it pulls the version that the step makes.

    a parameter server: HELD, its blocks' sums of squares ─► add ─┐
    another one: OK, a record with the norm ─► learn_of_version ─┴─► known ─► every pull that goes on says it

Each trainer may find the norm and tell it: all find the same bits, so whoever dies, the step is made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable

from trireme_shared.blocks.gradient_norm import norm_of
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import StepNorm


class StepNormFinder:
    """`step`: the one that makes the version. `fails`: a norm that is not finite is an error. `norm` is for parameter servers that wait,
    `measured` for people: also of steps that are not clipped."""

    def __init__(self, step: int, *, fails: bool) -> None:
        self._step, self._fails = step, fails
        self._timeline = -1
        self._squares: dict[int, float] = {}
        self._found = asyncio.Event()
        self.norm: StepNorm | None = None
        self.measured: float | None = None

    def __repr__(self) -> str:
        return f"<StepNormFinder of step {self._step}: {len(self._squares)} blocks, {self.norm}>"

    def add(self, timeline: int, squares: Iterable[tuple[int, float]], blocks: Collection[int]) -> None:
        """What one parameter server says of its blocks; `blocks`: numbers of all blocks of parameters. Raises InvalidArgument: the
        norm is not finite."""
        if self._is_current(timeline):
            self._squares.update(squares)
            if self.norm is None and len(self._squares) == len(blocks):
                self._know(norm_of(self._squares[block] for block in blocks))

    def learn_of_version(self, timeline: int, record: StepRecord) -> None:
        """A parameter server has made the step, so it was told the norm; nobody has its blocks' squares any more. Raises as `add`."""
        if record.grad_norm is not None and self._is_current(timeline):
            self._know(record.grad_norm)

    def measure(self, timeline: int, squares: Iterable[tuple[int, float]], blocks: Collection[int]) -> None:
        """As `add`, of a step that is not clipped: nobody waits for the norm, and it may be anything."""
        if self._is_current(timeline):
            self._squares.update(squares)
            if len(self._squares) == len(blocks):
                self.measured = norm_of(self._squares[block] for block in blocks)

    def _know(self, norm: float) -> None:
        if self._fails:
            check_finite(self._step, norm)
        self.measured = norm
        self.norm = StepNorm(timeline=self._timeline, step=self._step, norm=norm)
        self._found.set()

    def _is_current(self, timeline: int) -> bool:
        """Steps repeat after a rollback: what is said of an older timeline does not count."""
        if timeline > self._timeline:
            self._timeline, self.norm, self.measured = timeline, None, None
            self._squares.clear()
            self._found.clear()
        return timeline == self._timeline

    async def wait(self, limit_s: float) -> bool:
        """Until the norm is known, at most `limit_s`; answers whether it is."""
        return await event_within(self._found, limit_s)


def check_finite(step: int, norm: float) -> None:
    """Raises InvalidArgument."""
    if not math.isfinite(norm):
        raise InvalidArgument(
            f"the norm of the gradient of step {step} is {norm}, although each lane's gradient is finite",
            hint="lower the learning rate or look at the records; on_nonfinite = skip leaves such steps out",
        )
