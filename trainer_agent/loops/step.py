"""One synchronous step at one trainer: which lanes it has computed, and what of them is acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from trainer_agent.core.steps import nodes_to_compute
from trainer_agent.data_plane.outbox import Outboxes
from trainer_agent.model.compute import Compute, LaneResult, metrics_of, node_result
from trainer_agent.tasks.lane_reader import Portion
from trainer_agent.tasks.step_times import Times
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import StepMetrics, Task
from trireme_shared.protocol.records.step import LanePosition, LaneZero, NodeResult, result_of


@dataclass
class Step:
    """The step from version `number` to the next, which this trainer began at `began`. `shares`: its lanes that were acknowledged;
    `counted`: results of those, and of lanes of others, that came from this trainer first. `there`: its lanes that need not be pushed again."""

    number: int
    positions: tuple[LanePosition, ...]
    lane_zero: LaneZero
    began: float = 0.0
    shares: dict[int, tuple[Portion, LaneResult]] = field(default_factory=dict)
    counted: dict[int, LaneResult] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)
    times: Times = field(default_factory=Times)

    def metrics(self, timeline: int) -> StepMetrics | None:
        """This trainer's share of the loss, if it had any records."""
        share = metrics_of(list(self.counted.values()), self.number, self.positions[0].epoch, timeline)
        return share if share.records or share.skipped else None

    def finished_tasks(self) -> list[Task]:
        """The tasks whose last records were in this step."""
        return [p.task for p, _ in self.shares.values() if p.finishes and p.task is not None]


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class LaneWork:
    """Lanes of one step that this trainer computes; once `computed`, they can be pushed again under a new generation. `given_up`:
    others have pushed them all; what is not computed stays so. `rests`: no push of it is under way."""

    lanes: list[int]
    portions: dict[int, Portion]
    outboxes: Outboxes
    results: dict[int, LaneResult] = field(default_factory=dict)
    computed: bool = False
    given_up: bool = False
    rests: asyncio.Event = field(default_factory=_set)

    @property
    def is_finished(self) -> bool:
        """Whether backward has finished with every block; `computed` comes a moment later."""
        return self.computed or self.outboxes.added == self.outboxes.blocks * len(nodes_to_compute(self.lanes))

    @property
    def is_between_nodes(self) -> bool:
        """Whether of each node all blocks are pushed and the results are known, or none is pushed."""
        pushed, rest = divmod(self.outboxes.added, self.outboxes.blocks)
        lanes = sum(last - first for first, last in nodes_to_compute(self.lanes)[:pushed])
        return not rest and lanes <= len(self.results)

    def result_of(self, node: Interval, compute: Compute) -> NodeResult:
        """What the node's minibatches reported, once some of its blocks are finished: its last lane may still be computed."""
        results = {lane: self.results.get(lane) or compute.result() for lane in range(*node)}
        found = result_of(node, {(lane, lane + 1): node_result(each) for lane, each in results.items()})
        assert found is not None
        return found

    def count(self, step: Step) -> None:
        """It is acknowledged. Each lane's loss is counted once, however many trainers have computed it."""
        step.counted |= {lane: self.results[lane] for lane in self.outboxes.first if lane in self.results}
