"""What the training loops need of a model. TorchCompute is the real one; simulations have a tiny one of their
own.

    version s:  begin_step ─► per node, per lane: gradient ─► sink.done(block)
        ─► contribution(node, block) is pushed
    version s+1:  staging(block) filled by pulls ─► swap ─► current

The loops see no tensors: a block is a view of bytes, numbered as in `layout.blocks()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.metrics import MOST_NAMES, Logged
from trireme_shared.protocol.records import StepMetrics
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.metric_states import Sum
from trireme_shared.protocol.records.step import LaneZero, NodeResult, ParameterNumbers, StepRecord
from trireme_shared.protocol.records.tasks import MetricValue

if TYPE_CHECKING:
    from trainer_agent.model.flat import Place
    from trainer_agent.tables.files import StoredTable
    from trainer_agent.tables.trained import Lookup
    from trireme_shared.tables.grouping import Grouped, Numbers
    from trireme_shared.tables.lanes import LaneRows  # loads numba
    from trireme_shared.tables.memory import Floats

Records = Sequence[Mapping[str, Any]]
LANES_DIFFER = (
    "lanes of one step differ in whether the parameter {name} requires a gradient; all of them train the "
    "same parameters: let requires_grad_ in loss(model, batch) depend on what lanes share, such as an int64 "
    "buffer that loss counts up (each lane begins a step with the same value), not on records or on a "
    "counter of the process; or set lanes=1"
)
LOSSES_DIFFER = (
    "lanes of one step differ in whether the optimizer of the parameter {name} has a loss; all of them step "
    "the same optimizers: let loss(model, batch) choose by what lanes share, such as an int64 buffer that it "
    "counts up (each lane begins a step with the same value), not by records or by a counter of the process; "
    "a lane that has nothing for an optimizer gives it a loss of 0 that depends on its parameters; or set "
    "lanes=1"
)


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What happened between a step and the one before it, as far as schedules follow it. `epoch_ended`: it is
    the first step of an epoch behind another one. `metric`: the value of plateau_metric in the evaluation
    whose result takes effect here (NaN: it had none that is finite); None: no result does. `is_own` False:
    others make the step, so only the scheduler goes on, in a tenth of the time. `version`: the one that the
    step goes on from; None: the first one. `step_and_epoch`: the number of the step, and its epoch; None: in
    asynchronous jobs."""

    epoch_ended: bool = False
    metric: float | None = None
    is_own: bool = True
    version: StepRecord | None = None
    step_and_epoch: tuple[int, int] | None = None


NOTHING_BEFORE = BeforeStep()


@dataclass(frozen=True, slots=True)
class LaneResult:
    """Of one minibatch: loss x records, and the number of records. `skipped`: records that were left out,
    because the loss or a gradient was not finite. `metrics`: what the script reported with
    `trireme.log_metrics`. `warnings`: what the user should hear, each once. `frozen`, `unused`, `resting`:
    see NodeResult."""

    loss_sum: float
    records: int
    skipped: int = 0
    metrics: Mapping[str, Logged] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    frozen: ParameterNumbers | None = None
    unused: ParameterNumbers | None = None
    resting: ParameterNumbers = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A minibatch that `gradient` can begin with. `named`: of each embedding table, the ids that the script
    names. `rows`: theirs at the step's version, float32 (n, dim). `batch`: known to who made it alone."""

    named: Sequence[Grouped]
    batch: Any = None
    rows: Sequence[Floats] = ()

    @property
    def ids(self) -> list[Numbers]:
        """Of each table, int64 (n,), ascending, each once."""
        return [each.ids for each in self.named]

    @property
    def at_hand(self) -> list[tuple[Grouped, Floats]]:
        """Of each table."""
        return list(zip(self.named, self.rows, strict=True))


def metrics_of(
    results: Sequence[LaneResult], step: int, epoch: int, timeline: int, options: LaneZero | None = None
) -> StepMetrics:
    """The sums of these minibatches, with the learning rates in `options`."""
    logged: dict[str, Logged] = {}
    for result in results:
        for name, value in result.metrics.items():
            if name in logged or len(logged) < MOST_NAMES:
                logged[name] = logged[name].plus(value) if name in logged else value
    return StepMetrics(
        step=step,
        epoch=epoch,
        timeline=timeline,
        loss_sum=sum(result.loss_sum for result in results),
        records=sum(result.records for result in results),
        skipped=sum(result.skipped for result in results),
        metrics={name: MetricValue(**value._asdict()) for name, value in logged.items()},
        lr=options.learning_rates() if options is not None else (),
    )


def node_result(result: LaneResult) -> NodeResult:
    """As it is pushed."""
    return NodeResult.model_construct(
        loss_sum=result.loss_sum,
        records=result.records,
        skipped=result.skipped,
        metrics={name: (v.total, v.weight, v.least, v.most) for name, v in result.metrics.items()},
        frozen=result.frozen,
        unused=result.unused,
        resting=result.resting,
    )


def lanes_differ(places: Sequence[Place], number: int, kind: str = "frozen") -> str:
    """A sentence about the parameter with that number. `kind`: see FrozenDiffer."""
    name = next((place.name for place in places if place.number == number), f"number {number}")
    return (LOSSES_DIFFER if kind == "resting" else LANES_DIFFER).format(name=name)


class BlockSink(Protocol):
    """Takes the blocks of a gradient one after the other, on their way from backward to the outbox of the
    block's owner."""

    def done(self, block: int) -> None:
        """The block's values are final. Called once for each block."""
        ...


class Compute(Protocol):
    """One trainer's model. Calls are never concurrent: the loop awaits `gradient`, `evaluate` and `export`
    one by one.

    Errors of the user's code are raised as trireme_shared.protocol.errors.UserCodeError.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def places(self) -> Sequence[Place]:
        """Of the parameters in the segments, in the order of the model."""
        ...

    @property
    def by_columns(self) -> bool:
        """Whether minibatches are made of the columns of records: the script has no collate of its own."""

    @property
    def is_finished(self) -> bool:
        """Whether the script has gone on behind its own loop: then there are no more gradients, and only a
        new process can train."""

    @property
    def may_initialise(self) -> bool:
        """Whether it has all that parameter servers start with. False: it was made for a job that had begun;
        only a new one can."""

    def current(self, block: int) -> memoryview:
        """Bytes of a block of the parameters in use; at first these are the initial values of (model,
        seed)."""

    def staging(self, block: int) -> memoryview:
        """Writable bytes for the block's next value, which a pull brings."""

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        """Write the block's next value to the staging vector; `payload` has it in a narrower dtype."""

    def keep(self, block: int) -> None:
        """The block's next value is the one in use."""

    def swap(self) -> None:
        """The complete staging vector becomes the parameters in use, and the old one becomes the staging
        vector."""

    def begin_step(self, before: BeforeStep = NOTHING_BEFORE) -> LaneZero:
        """Once per step, before its gradients: the options of this step, and the scheduler's state after
        it."""

    def initial_lane_zero(self) -> LaneZero:
        """What version 0 carries: the options the optimizer groups start with and the scheduler's first
        state."""

    def initial_state(self, block: int) -> Sequence[tuple[str, memoryview]]:
        """(name, bytes) of each tensor of the state that the block's optimizer starts with; empty: it starts
        fresh. Until the first `begin_step`."""

    def restore(self, lane_zero: LaneZero) -> None:
        """Scheduler and options as after the step that made a version; the next `begin_step` goes on from
        there. The residuals of earlier casts are cleared."""

    async def prepare(self, seed: int, records: Records) -> Ready | None:
        """A minibatch for `gradient`, without rows; None: the script does not say which it will look up. It
        changes nothing that other calls see."""

    async def gradient(
        self,
        node: Interval,
        lane: int,
        seed: int,
        records: Records | None,
        sink: BlockSink,
        ready: Ready | None = None,
    ) -> LaneResult:
        """Forward and backward of one minibatch (`None`: the lane is empty) with random numbers from `seed`.

        One call for each lane of a node [first, last), in order. During the call for the last lane,
        `sink.done(block)` is called in the event loop, exactly once per block, when backward has finished
        with the block (small blocks may wait for others). From then on `contribution(node, block)` is the
        weighted mean over the node's lanes (trireme_shared.protocol.lanes.combine, canonical tree), cast to
        the dtype in which gradients are sent. If cancelled, it returns only when no thread uses the vectors
        any more. `ready`: of these records and this seed, with rows; for one call. The result is the same
        with and without it.
        """

    def result(self) -> LaneResult:
        """Of the lane whose `gradient` is under way, from its first finished block on, or of the last one."""

    def contribution(self, node: Interval, block: int) -> memoryview:
        """Bytes of a finished block of a node, readable until `forget_nodes`; may be empty if no lane had
        records."""

    def samples(self, node: Interval) -> int:
        """How many records the mean of a node with a finished block is of."""

    def read_rows(self, lookup: Lookup) -> None:
        """Where the coming forward passes find the rows of embedding tables."""

    def lane_rows(self) -> Sequence[LaneRows]:
        """Of each embedding table: the gradients of rows that the last `gradient` made; without ids if its
        lane had no records, or they were left out."""

    def forget_nodes(self) -> None:
        """All contributions may be overwritten: their pushes are over, or the step is computed again."""

    async def evaluate(self, records: Records, seed: int = 0, *, pinned: bool = False) -> Mapping[str, Sum]:
        """Sums over one minibatch, and states of metric objects, in evaluation mode, with random numbers from
        `seed`. With the parameters in use, or (`pinned`) with those written to `pinned`; the next gradient is
        the same as without it."""

    def pinned(self, block: int) -> memoryview:
        """Writable bytes of a block of a second set of parameters, for `evaluate`. It takes as much memory as
        the parameters."""

    def pin_rows(self, tables: Sequence[StoredTable]) -> None:
        """All embedding tables as `evaluate` of what is pinned looks them up."""

    def forget_pinned(self) -> None:
        """Free that memory."""

    async def metrics(self, sums: Mapping[str, Sum]) -> dict[str, float]:
        """Metrics out of the sums and states over the whole evaluation set."""

    async def export(self, directory: str) -> dict[str, str]:
        """Write the parameters in use below `directory` (path or fsspec URL); kind -> URL of each file."""

    async def finish(self) -> None:
        """The training is over, and this trainer has exported the model: what the script does after its own
        loop."""
