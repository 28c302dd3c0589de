"""One synchronous step whatever happens meanwhile: this trainer's lanes are computed, pushed and acknowledged.

    for each generation until the next version is whole:
        missing lanes = mine - acknowledged ─► records ─► claim, if a task was discarded ─► push ─► acknowledged

Lanes that are computed already are only pushed again. A trainer that gets more lanes in a new generation computes those.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from shared.errors import DeadlineExceeded, StaleGeneration, StepTorn
from shared.records import Mode, StepMetrics, Task
from shared.records.step import LanePosition, LaneZero
from shared.runtime import telemetry
from shared.runtime.waiting import event_within
from shared.wire.messages import PushHeader
from trainer_agent.core.duties import Next
from trainer_agent.data_plane.outbox import Outboxes
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.joining import REFRESH_S, Joiner
from trainer_agent.loops.timeline import RolledBack, timeline_of
from trainer_agent.model.compute import LaneResult, metrics_of
from trainer_agent.tasks.lane_reader import LaneReaders, Portion

SETTLE_S = 10.0
TORN_S = 60.0
IDLE_S = 30.0

log = telemetry.logger("repair")


@dataclass
class Step:
    """The step from version `number` to the next. `shares`: this trainer's lanes that are acknowledged."""

    number: int
    positions: tuple[LanePosition, ...]
    lane_zero: LaneZero
    shares: dict[int, tuple[Portion, LaneResult]] = field(default_factory=dict)

    def metrics(self, timeline: int) -> StepMetrics | None:
        """This trainer's share of the loss, if it had any records."""
        results = [result for _, result in self.shares.values()]
        share = metrics_of(results, self.number, self.positions[0].epoch, timeline)
        return share if share.records or share.skipped else None

    def finished_tasks(self) -> list[Task]:
        """The tasks whose last records were in this step."""
        return [p.task for p, _ in self.shares.values() if p.finishes and p.task is not None]


@dataclass
class LaneWork:
    """Lanes of one step that this trainer computes; once `computed`, they can be pushed again under a new generation."""

    lanes: list[int]
    portions: dict[int, Portion]
    outboxes: Outboxes
    results: dict[int, LaneResult] = field(default_factory=dict)
    computed: bool = False


Push = Callable[[Step, PushHeader, LaneWork], Awaitable[bool]]


class StepRepair:
    """`push` computes what is not computed yet and pushes it; True if every block is acknowledged."""

    def __init__(self, context: LoopContext, readers: LaneReaders, joiner: Joiner, push: Push) -> None:
        self._directory, self._transfer, self._duty = context.directory, context.transfer, context.duty
        self._readers, self._joiner, self._push = readers, joiner, push
        self._trainer, self._dtypes = context.source.trainer, context.gradient_dtypes
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    @contextlib.contextmanager
    def contributing(self) -> Iterator[None]:
        """Around a step: busy until `contribute` has found nothing to do."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    async def contribute(self, step: Step) -> None:
        """Push this trainer's lanes of the step, again for each generation, until cancelled. Raises TaskFailed, RolledBack."""
        work: LaneWork | None = None
        while True:
            duty = self._duty()
            missing = [lane for lane in range(*duty.lanes) if lane not in step.shares]
            if missing:
                self._idle.clear()
                self._readers.keep(duty.lanes)
                try:
                    if work is None or work.lanes != missing or not work.computed:
                        # all records before any gradient: a push begins with the positions after the step
                        portions = await self._readers.read(missing, step.positions)
                        work = LaneWork(missing, portions, Outboxes(self._transfer.routes, self._dtypes))
                    header = self._header(step, duty.generation, work)
                    await self.claim(header, work)
                    if await self._push(step, header, work):
                        step.shares |= {lane: (work.portions[lane], work.results[lane]) for lane in missing}
                except StaleGeneration as error:
                    log.info("generation_stale", step=step.number, generation=duty.generation, cause=error.message)
            self._idle.set()
            await self._other_duty(duty, IDLE_S if step.shares.keys() >= set(missing) else REFRESH_S)

    async def settle(self, contribution: asyncio.Task[None]) -> None:
        """The next version is whole: wait for the answers to our own pushes, then end the step."""
        if self.busy and not await event_within(self._idle, SETTLE_S):
            log.warning("push_unanswered", seconds=SETTLE_S)
        contribution.cancel()

    async def claim(self, header: PushHeader, work: LaneWork) -> None:
        """Before a lane goes on behind a discarded task: some blocks may have got that task's data, or it is on its way.
        Every parameter server must promise to take none of it before any gets the next task's data. Raises RolledBack."""
        skipped = [lane for lane, portion in work.portions.items() if portion.skipped]
        if not skipped:
            return
        positions = tuple(work.portions[lane].after for lane in skipped)
        lane_zero = header.lane_zero if 0 in skipped else None
        claim = header.model_copy(update={"claim": True, "positions": positions, "lane_zero": lane_zero})
        try:
            await self._transfer.claim(claim)
        except StepTorn as error:
            log.warning("step_torn", step=header.step, cause=error.message)
            timeline = self._joiner.timeline
            await self._directory.wait_for(
                lambda view: timeline_of(view) != timeline, TORN_S, "the job to go back behind a torn step"
            )
            raise RolledBack(error.message) from error

    def _header(self, step: Step, generation: int, work: LaneWork) -> PushHeader:
        return PushHeader(
            **{**self._transfer.envelope(), "generation": generation},
            mode=Mode.SYNC,
            trainer=self._trainer,
            step=step.number,
            positions=tuple(portion.after for portion in work.portions.values()),
            lane_zero=step.lane_zero if 0 in work.lanes else None,
        )

    async def _other_duty(self, duty: Next, limit_s: float) -> None:
        """Wait until this trainer's duty is another one, at most `limit_s`: then lost pushes are sent again."""
        with contextlib.suppress(DeadlineExceeded):
            await self._directory.wait_for(lambda _: self._duty() != duty, limit_s, "a new generation")
