"""One synchronous step whatever happens meanwhile: this trainer's lanes are computed, pushed and acknowledged.

    for each generation until the next version is whole:
        missing lanes = mine - acknowledged ─► records ─► claim, if a task was discarded ─► push ─► acknowledged
        then, while others are late: their lanes too (helping.py)

Lanes that are computed already are only pushed again. A trainer that gets more lanes in a new generation computes those. Who is
late itself gives its lanes up as soon as the version is whole: another trainer has computed them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

from shared.errors import DeadlineExceeded, StaleGeneration, StepTorn
from shared.records import Mode
from shared.runtime import telemetry
from shared.runtime.waiting import event_within
from shared.wire.messages import PushHeader
from trainer_agent.core.duties import Next
from trainer_agent.data_plane.outbox import Outboxes
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.helping import LaneHelper
from trainer_agent.loops.joining import REFRESH_S, Joiner
from trainer_agent.loops.step import LaneWork, Push, Step
from trainer_agent.loops.timeline import RolledBack, timeline_of
from trainer_agent.tasks.lane_reader import LaneReaders
from trainer_agent.waiting.single_error import SingleErrorGroup

SETTLE_S = 10.0
TORN_S = 60.0
IDLE_S = 30.0

log = telemetry.logger("repair")


class StepRepair:
    """`push` computes what is not computed yet and pushes it; True if every block is acknowledged."""

    def __init__(
        self, context: LoopContext, readers: LaneReaders, joiner: Joiner, push: Push, helper: LaneHelper
    ) -> None:
        self._directory, self._transfer, self._duty = context.directory, context.transfer, context.duty
        self._readers, self._joiner, self._push, self._helper = readers, joiner, push, helper
        self._work: LaneWork | None = None
        self._reports = context.reports
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
        work = self._work = None
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
                        work = self._work = LaneWork(missing, portions, Outboxes(self._transfer.routes, self._dtypes))
                    header = self._header(step, duty.generation, work)
                    await self.claim(header, work)
                    if await self._push(step, header, work):
                        step.times.pushed()
                        step.shares |= {lane: (work.portions[lane], result) for lane, result in work.results.items()}
                        work.count(step)
                    if work.given_up:
                        return
                    if step.shares.keys() >= set(missing):
                        self._helper.share_done(step)
                except StaleGeneration as error:
                    log.info("generation_stale", step=step.number, generation=duty.generation, cause=error.message)
            self._idle.set()
            if step.shares.keys() >= set(missing):
                await self._help(step, duty)
            else:
                await self._other_duty(duty, REFRESH_S)

    async def _help(self, step: Step, duty: Next) -> None:
        """Until this trainer's duty is another one, at most IDLE_S: then lost pushes are sent again."""
        late_s = self._helper.late_in(step, duty)
        if late_s is None or late_s >= IDLE_S or await self._other_duty(duty, late_s):
            await self._other_duty(duty, IDLE_S)
            return
        async with SingleErrorGroup() as group:
            header = partial(self._header, step, duty.generation)
            helping = group.create_task(self._helper.help(step, duty, header))
            await self._other_duty(duty, IDLE_S)
            helping.cancel()

    async def settle(self, contribution: asyncio.Task[None]) -> LaneWork | None:
        """The next version is whole: wait for the answers to our own pushes, then end the step. Own lanes that are not computed are
        given up, because others have pushed them; they are answered."""
        work = self._work if self.busy else self._helper.work
        unfinished = self._work if self._work is not None and not self._work.is_finished else None
        if work is not None and not work.rests.is_set():
            if not work.is_finished and work.is_between_nodes:
                work.given_up = True
                contribution.cancel()  # _push goes on with the answers to what was pushed
            if not await event_within(work.rests, SETTLE_S):
                log.warning("push_unanswered", seconds=SETTLE_S)
        contribution.cancel()
        return unfinished

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
            stored=self._reports.steps.stored if 0 in work.lanes else 0,
        )

    async def _other_duty(self, duty: Next, limit_s: float) -> bool:
        """Wait until this trainer's duty is another one, at most `limit_s`; answers whether it is."""
        with contextlib.suppress(DeadlineExceeded):
            await self._directory.wait_for(lambda _: self._duty() != duty, limit_s, "a new generation")
        return self._duty() != duty
