"""Lanes of one step, computed and pushed: for this trainer's own lanes, again in another generation, and for
lanes of others that are late.

    records ─► minibatch ─► loss ─► backward ─NodeSink, block by block─► outboxes of the blocks' owners
        ─► pushed meanwhile

Step         what this trainer has done of one step       LaneWork     some lanes of it, computed here
RowsAhead    rows of coming minibatches are asked for     Pace         how long lanes take here
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from trainer_agent.data_plane.pushes import NodeSink, Outboxes, PushedRows, Verdict
from trainer_agent.loops.context import LoopContext
from trainer_agent.model.compute import Compute, LaneResult, Ready, Records, metrics_of, node_result
from trainer_agent.tasks.lane_reader import LaneReaders, Portion
from trainer_agent.tasks.source import TaskFailed, outcome_of
from trainer_agent.tasks.steps import Times
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TriremeError, UserCodeError
from trireme_shared.protocol.lanes import Interval, aligned_intervals, step_seed
from trireme_shared.protocol.records import StepMetrics, Task
from trireme_shared.protocol.records.step import LanePosition, LaneZero, NodeResult, result_of
from trireme_shared.protocol.wire.messages import PushHeader

if TYPE_CHECKING:
    from trireme_shared.tables.grouping import Numbers
    from trireme_shared.tables.memory import Floats

KEPT = 16
ENOUGH = 3  # the first minibatches compile, allocate, warm up
FRESH_S = 10.0
Lookup = Callable[[int | None, "Sequence[Numbers]"], Awaitable["Sequence[Floats]"]]


@dataclass
class Step:
    """The step from version `number` to the next, which this trainer began at `began`. `shares`: its lanes
    that were acknowledged; `counted`: results of those, and of lanes of others, that came from this trainer
    first. `there`: its lanes that need not be pushed again."""

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


@dataclass
class LaneWork:
    """Lanes of one step that this trainer computes; once `computed`, they can be pushed again under a new
    generation. `given_up`: others have pushed them all; what is not computed stays so. `rests`: no push of it
    is under way."""

    lanes: list[int]
    portions: dict[int, Portion]
    outboxes: Outboxes
    results: dict[int, LaneResult] = field(default_factory=dict)
    computed: bool = False
    given_up: bool = False
    rests: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rests.set()

    @property
    def is_finished(self) -> bool:
        """Whether backward has finished with every block; `computed` comes a moment later."""
        return self.computed or self.outboxes.added == self.outboxes.blocks * len(
            nodes_to_compute(self.lanes)
        )

    @property
    def is_between_nodes(self) -> bool:
        """Whether of each node all blocks are pushed and the results are known, or none is pushed."""
        pushed, rest = divmod(self.outboxes.added, self.outboxes.blocks)
        lanes = sum(last - first for first, last in nodes_to_compute(self.lanes)[:pushed])
        return not rest and lanes <= len(self.results)

    def result_of(self, node: Interval, compute: Compute) -> NodeResult:
        """What the node's minibatches reported, once some of its blocks are finished: its last lane may still
        be computed."""
        results = {lane: self.results.get(lane) or compute.result() for lane in range(*node)}
        found = result_of(node, {(lane, lane + 1): node_result(each) for lane, each in results.items()})
        assert found is not None
        return found

    def count(self, step: Step) -> None:
        """It is acknowledged. Each lane's loss is counted once, however many trainers have computed it."""
        step.counted |= {lane: self.results[lane] for lane in self.outboxes.first if lane in self.results}


class LanePusher:
    """A synchronous loop has one LanePusher, and uses it within `fetching_ahead`."""

    def __init__(self, context: LoopContext, readers: LaneReaders) -> None:
        self._compute, self._exchange, self._reports = context.compute, context.exchange, context.reports
        self._readers, self._seed = readers, context.spec.seed
        self._dtypes = context.gradient_dtypes
        self._ahead = RowsAhead(context.compute, context.exchange.rows.lookup)
        self._prefetching: asyncio.TaskGroup
        #: how long this trainer's lanes take
        self.pace = Pace()

    def __repr__(self) -> str:
        return f"<LanePusher {self.pace!r}, {self._ahead!r}>"

    @asynccontextmanager
    async def fetching_ahead(self) -> AsyncIterator[None]:
        """Fetch tasks and rows before they are needed, as long as the block runs; all steps run in it."""
        async with SingleErrorGroup() as self._prefetching:
            yield
            self._readers.keep((0, 0))
            self.drop_ahead()

    def drop_ahead(self) -> None:
        """Rows that were asked for ahead are not needed any more."""
        self._ahead.drop()

    # ------------------------------------------------------------ push

    def work(self, lanes: list[int], portions: dict[int, Portion]) -> LaneWork:
        """Lanes with their records, of which nothing is computed yet."""
        return LaneWork(lanes, portions, Outboxes(self._exchange.fleet.routes, self._dtypes))

    async def push(self, step: Step, header: PushHeader, work: LaneWork) -> bool:
        """Compute the lanes, unless they are computed already, and push each block as soon as it is finished.
        True if all blocks are acknowledged. Raises TaskFailed, UserCodeError, TriremeError."""
        work.rests.clear()
        try:
            async with self._exchange.pushing(header, work.outboxes) as verdicts:
                if not work.computed:
                    await self._compute_unless_given_up(step, work)
        finally:
            work.rests.set()
        return set(verdicts.values()) <= {Verdict.ACKNOWLEDGED}

    def refill(self, work: LaneWork) -> None:
        """Put what is computed into outboxes once more, by the owners of blocks in the present generation."""
        boxes = Outboxes(self._exchange.fleet.routes, self._dtypes)
        for node in nodes_to_compute(work.lanes):
            sink = self._sink(work, boxes, node)
            for block in range(boxes.blocks):
                sink.done(block)
        for lane, pushed in work.outboxes.rows.items():
            boxes.add_rows(lane, pushed, self._exchange.router.row_parts(boxes.routes, pushed.rows))
        boxes.close()
        work.outboxes = boxes

    def _sink(self, work: LaneWork, boxes: Outboxes, node: Interval) -> NodeSink:
        return NodeSink(boxes, node, self._compute, partial(work.result_of, node, self._compute))

    # ------------------------------------------------------------ compute

    async def _compute_unless_given_up(self, step: Step, work: LaneWork) -> None:
        """Given up: what was pushed is acknowledged all the same, and the connections stay."""
        try:
            await self._compute_gradients(step, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not work.given_up or task is None:
                raise
            task.uncancel()
            work.outboxes.close()

    async def _compute_gradients(self, step: Step, work: LaneWork) -> None:
        """Forward and backward of each lane's minibatch. A node is a group of lanes whose mean gradient is
        pushed as one."""
        self._readers.read_ahead(work.lanes, self._prefetching)
        if not self._exchange.makes_steps_again:
            self._compute.forget_nodes()
        tables = bool(self._compute.layout.tables)
        if tables:
            self._compute.read_rows(partial(self._exchange.rows.lookup, step.number))
        for node in nodes_to_compute(work.lanes):
            sink = self._sink(work, work.outboxes, node)
            for lane in range(*node):
                portion, seed = work.portions[lane], step_seed(self._seed, step.number, lane)
                try:
                    with self.pace.lane(bool(portion.records)), step.times.computing():
                        ready = await self._ready(step, work, lane)
                        work.results[lane] = await self._compute.gradient(
                            node, lane, seed, portion.records, sink, ready
                        )
                    if tables:
                        result, rows = work.results[lane], self._compute.lane_rows()
                        pushed = PushedRows(rows, result.records, node_result(result))
                        parts = self._exchange.router.row_parts(work.outboxes.routes, rows)
                        work.outboxes.add_rows(lane, pushed, parts)
                except UserCodeError as error:
                    if portion.task is None:
                        raise
                    raise TaskFailed(portion.task, error, f"step {step.number}, lane {lane}") from error
                self._reports.notice(work.results[lane], step=step.number, lane=lane)
        work.outboxes.close()
        work.computed = True
        self.fetch_ahead(step, work)

    # ------------------------------------------------------------ ahead

    async def _ready(self, step: Step, work: LaneWork, lane: int) -> Ready | None:
        """This lane's minibatch; the rows of the next one are asked for."""
        seed = partial(step_seed, self._seed, step.number)
        ready = await self._ahead.ready(lane, step.number, seed(lane), work.portions[lane].records)
        if (following := next((each for each in work.lanes if each > lane), None)) is not None:
            records = work.portions[following].records
            self._ahead.ask(following, step.number, seed(following), records, self._prefetching)
            await asyncio.sleep(0)  # it is collated before this lane is computed: both need the thread
        return ready

    def fetch_ahead(self, step: Step, work: LaneWork) -> None:
        """The next task of each lane whose task ends in this step; the rows that the first of the next step's
        minibatches looks up."""
        for lane, portion in work.portions.items():
            if portion.finishes:
                self._readers[lane].prefetch(portion.after, self._prefetching)
        first = work.lanes[0]
        if (following := self._readers.next(first, work.portions[first].after)) is not None:
            seed = step_seed(self._seed, step.number + 1, first)
            self._ahead.ask(first, step.number + 1, seed, following.records, self._prefetching)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of a lane's minibatch. `task`: None if it fails."""

    seed: int
    records: Records
    task: asyncio.Task[Ready | None]


class RowsAhead:
    """Rows of minibatches that come, asked for before they are computed, if the script says which they are
    (`ids`).

        lane k: rows at hand ─► lane k + 1: collate, ids ─► asked for, all tables at once
            ─► lane k is computed
        the last lane is computed ─► the first one of the next step: asked for
                                     parameter servers answer when they have the version

        chronous: the minibatches of a push are the lanes. The first one of the next push is asked for when
         push is acknowledged, so it sees this one's rows.

    What was asked for in vain (the job went back, a parameter server is gone) is asked for again when it is
    needed, and then fails as it would have without. A trainer has one RowsAhead. `lookup`: version, and ids
    of each table -> their rows."""

    def __init__(self, compute: Compute, lookup: Lookup) -> None:
        self._compute, self._lookup = compute, lookup
        self._asked: dict[int, _Asked] = {}
        self._says = bool(compute.layout.tables)  # whether the script says which rows it will look up

    def __repr__(self) -> str:
        return f"<RowsAhead of lanes {sorted(self._asked)}>"

    async def ready(self, lane: int, version: int | None, seed: int, records: Records | None) -> Ready | None:
        """For Compute.gradient of that lane, with rows at `version`. Raises what getting the minibatch ready
        and looking up raise."""
        if not self._says or not records:
            return None
        asked = self._asked.get(lane)
        if asked is not None and asked.seed == seed and asked.records is records:
            found = await outcome_of(asked.task)
            self._asked.pop(lane, None)
            if found is not None:
                return found
        return await self._ready(version, seed, records)

    def ask(
        self, lane: int, version: int | None, seed: int, records: Records | None, group: asyncio.TaskGroup
    ) -> None:
        """For a `ready` that comes, which raises what fails here."""
        if not self._says or not records:
            return
        if (asked := self._asked.get(lane)) is not None:
            if asked.seed == seed and asked.records is records:
                return
            asked.task.cancel()
        self._asked[lane] = _Asked(
            seed, records, group.create_task(self._ready_or_none(version, seed, records))
        )

    def drop(self) -> None:
        """Nothing that was asked for is needed any more."""
        for asked in self._asked.values():
            asked.task.cancel()
        self._asked.clear()

    async def _ready(self, version: int | None, seed: int, records: Records) -> Ready | None:
        ready = await self._compute.prepare(seed, records)
        self._says = ready is not None
        return None if ready is None else replace(ready, rows=await self._lookup(version, ready.ids))

    async def _ready_or_none(self, version: int | None, seed: int, records: Records) -> Ready | None:
        try:
            return await self._ready(version, seed, records)
        except TriremeError:
            return None


class Pace:
    """How fast this trainer computes: seconds for one lane, and for all its lanes of a step until they are
    acknowledged. Medians of the last KEPT: one hiccup changes nothing."""

    def __init__(self) -> None:
        self._lanes: deque[float] = deque(maxlen=KEPT)
        self._least: deque[float] = deque(maxlen=KEPT)
        self._shares: deque[float] = deque(maxlen=KEPT)
        self._since: float | None = None
        self._measured_at = self._least_at = 0.0

    def __repr__(self) -> str:
        return f"<Pace: {self.lane_s} s a lane, {self.share_s} s a step>"

    @contextmanager
    def lane(self, counts: bool) -> Iterator[None]:
        """Measure forward and backward of one lane, which `counts` if it has records. Without records, or if
        it is given up before its end, a whole one would have taken longer."""
        self._since = since = clock.monotonic()
        ended = False
        try:
            yield
            ended = True
        finally:
            self._since, now = None, clock.monotonic()
            if counts and (ended or self._lanes):
                least_s = 0.0 if ended else median(self._lanes)
                self._lanes.append(max(now - since, least_s))
                self._measured_at = now
            else:
                self._least.append(now - since)
                self._least_at = now

    def share_done(self, seconds: float) -> None:
        """All lanes of a step were computed and acknowledged."""
        self._shares.append(seconds)

    @property
    def lane_s(self) -> float | None:
        """None: not known yet, or not measured for FRESH_S. A lane under way counts as soon as it takes
        longer than usual."""
        return self._median(self._lanes, self._measured_at)

    @property
    def least_lane_s(self) -> float | None:
        """A lane with records would take at least so long, by those without records and those given up. It
        may take much longer."""
        return self._median(self._least, self._least_at)

    def _median(self, measured: deque[float], at: float) -> float | None:
        now = clock.monotonic()
        if len(measured) < ENOUGH or (self._since is None and now - at > FRESH_S):
            return None
        under_way = now - self._since if self._since is not None else 0.0
        return max(median(measured), under_way) or None

    @property
    def share_s(self) -> float | None:
        """None: not known yet."""
        return median(self._shares) if len(self._shares) >= ENOUGH else None


def nodes_to_compute(missing: Sequence[int]) -> list[Interval]:
    """The tree nodes that cover the `missing` lanes (ascending). The largest first: it needs the fewest
    gradient vectors."""
    nodes: list[Interval] = []
    start = 0
    for end in range(1, len(missing) + 1):
        if end == len(missing) or missing[end] != missing[end - 1] + 1:
            nodes += aligned_intervals(missing[start], missing[end - 1] + 1)
            start = end
    return sorted(nodes, key=lambda node: (node[0] - node[1], node[0]))
