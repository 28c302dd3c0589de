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

from trainer_agent.core.duties import Next
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.helping import LaneHelper
from trainer_agent.loops.joining import REFRESH_S, Joiner
from trainer_agent.loops.lane_pusher import LanePusher
from trainer_agent.loops.step import LaneWork, Step
from trainer_agent.loops.timeline import RolledBack, timeline_of
from trainer_agent.tasks.lane_reader import LaneReaders
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import DeadlineExceeded, StaleGeneration, StepTorn
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import PushHeader

SETTLE_S = 10.0
TORN_S = 60.0
IDLE_S = 30.0

log = telemetry.logger("repair")


class StepRepair:
    """A synchronous loop has one StepRepair."""

    def __init__(
        self, context: LoopContext, readers: LaneReaders, joiner: Joiner, pusher: LanePusher, helper: LaneHelper
    ) -> None:
        self._directory, self._exchange, self._duty = context.directory, context.exchange, context.duty
        self._readers, self._joiner, self._pusher, self._helper = readers, joiner, pusher, helper
        self._work: LaneWork | None = None
        self._computed: list[LaneWork] = []
        self._reports = context.reports
        self._trainer = context.source.trainer
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
        self._work, self._computed, generation = None, [], -1
        while True:
            duty = self._duty()
            if self._exchange.makes_steps_again and duty.generation != generation:
                step.there.clear()
            generation = duty.generation
            missing = [lane for lane in range(*duty.lanes) if lane not in step.there]
            if missing:
                self._idle.clear()
                self._readers.keep(duty.lanes)
                try:
                    if not await self._push_lanes(step, duty, missing):
                        return
                    if step.there >= set(missing):
                        self._helper.share_done(step)
                except StaleGeneration as error:
                    log.info("generation_stale", step=step.number, generation=duty.generation, cause=error.message)
            self._idle.set()
            if step.there >= set(missing):
                await self._help(step, duty)
            else:
                await self._other_duty(duty, REFRESH_S)

    async def _push_lanes(self, step: Step, duty: Next, missing: list[int]) -> bool:
        """What is computed is pushed again, the rest is computed. False: that was given up, others have pushed it."""
        works = self._again(missing)
        if left := [lane for lane in missing if not any(lane in work.lanes for work in works)]:
            # all records before any gradient: a push begins with the positions after the step
            portions = await self._readers.read(left, step.positions)
            works.append(self._pusher.work(left, portions))
        for work in works:
            self._work = work
            header = self._header(step, duty.generation, work)
            await self.claim(header, work)
            acknowledged = await self._pusher.push(step, header, work)
            if work.computed and work not in self._computed:
                self._computed = [*self._computed, work] if self._exchange.makes_steps_again else [work]
            if acknowledged:
                step.times.pushed()
                step.shares |= {lane: (work.portions[lane], result) for lane, result in work.results.items()}
                step.there.update(work.lanes)
                work.count(step)
            if work.given_up:
                return False
        return True

    def _again(self, missing: list[int]) -> list[LaneWork]:
        """What is computed of the missing lanes, to be pushed as it is."""
        if not self._exchange.makes_steps_again:
            return [work for work in self._computed if work.lanes == missing]
        found = [work for work in self._computed if not set(missing).isdisjoint(work.lanes)]
        for work in found:
            self._pusher.refill(work)
        return found

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
                contribution.cancel()  # the pusher goes on with the answers to what was pushed
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
        claim = header.with_fields(claim=True, positions=positions, lane_zero=lane_zero)
        try:
            await self._exchange.claim(claim)
        except StepTorn as error:
            log.warning("step_torn", step=header.step, cause=error.message)
            timeline, again = self._joiner.timeline, self._exchange.makes_steps_again
            await self._directory.wait_for(
                lambda view: (
                    timeline_of(view) != timeline or (again and self._exchange.fleet.generation > header.generation)
                ),
                TORN_S,
                "the job to go back behind a torn step",
            )
            if timeline_of(self._directory) == timeline:
                raise StaleGeneration(error.message) from error
            raise RolledBack(error.message) from error

    def _header(self, step: Step, generation: int, work: LaneWork) -> PushHeader:
        return PushHeader(
            **{**self._exchange.fleet.envelope(), "generation": generation},
            mode=Mode.SYNC,
            trainer=self._trainer,
            step=step.number,
            positions=tuple(portion.after for portion in work.portions.values()),
            lane_zero=step.lane_zero if 0 in work.lanes else None,
            stored=self._reports.steps.stored_in(self._joiner.timeline) if 0 in work.lanes else 0,
        )

    async def _other_duty(self, duty: Next, limit_s: float) -> bool:
        """Wait until this trainer's duty is another one, at most `limit_s`; answers whether it is."""
        with contextlib.suppress(DeadlineExceeded):
            await self._directory.wait_for(lambda _: self._duty() != duty, limit_s, "a new generation")
        return self._duty() != duty
