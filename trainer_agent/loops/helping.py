"""Lanes of others that are late: a trainer that has finished its own computes them too, while it waits for the version.

own lanes acknowledged ─► `straggler_factor` times the usual time has passed ─► one parameter server is asked which lanes are missing
      ─► those this trainer is the helper of (core/helpers.py) ─► task, if not known: one look at the queue ─► compute, push

Whoever comes first has contributed; the parameter servers acknowledge the other push as a duplicate. Both have the same bits. The
rounds come at 1, 2, 4, … times that time after the step's begin, each with other helpers and another parameter server to ask.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from trainer_agent.core.duties import Next
from trainer_agent.core.helpers import lanes_to_help, usual_share_s
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.lane_pusher import LanePusher
from trainer_agent.loops.step import LaneWork, Step
from trainer_agent.tasks.lane_reader import Portion, is_due, portion_of
from trainer_agent.tasks.source import LoadedTask, TaskFailed
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.step import LanePosition
from trireme_shared.protocol.wire.messages import PushHeader

KEPT_TASKS = 8
LEAST_LATE_S = 0.05  # shorter delays are jitter
SPREAD = 0.1  # of the time between rounds: within it the trainers ask one after the other

log = telemetry.logger("helping")

HeaderOf = Callable[[LaneWork], PushHeader]


class LaneHelper:
    """A synchronous loop has one LaneHelper. `work`: the last lane of another trainer that it computed."""

    def __init__(self, context: LoopContext, pusher: LanePusher) -> None:
        self._spec, self._directory, self._exchange = context.spec, context.directory, context.exchange
        self._source = context.source
        self._pusher, self._pace = pusher, pusher.pace
        self.work: LaneWork | None = None
        self._tasks: OrderedDict[int, LoadedTask] = OrderedDict()

    def __repr__(self) -> str:
        return f"<LaneHelper {self._source.trainer}: {self._pace!r}, tasks of lanes {list(self._tasks)}>"

    def share_done(self, step: Step) -> None:
        """This trainer's own lanes of the step are acknowledged."""
        self._pace.share_done(clock.monotonic() - step.began)
        self.work = None

    def late_in(self, step: Step, duty: Next) -> float | None:
        """Seconds until lanes of others count as late; None: they never do."""
        period_s = self._period_s(duty)
        return None if period_s is None else max(LEAST_LATE_S, step.began + period_s - clock.monotonic())

    async def help(self, step: Step, duty: Next, header_of: HeaderOf) -> None:
        """Until cancelled, because the version is whole or the generation is over."""
        period_s, trainers = self._period_s(duty), self._directory.trainers
        if period_s is None:
            return
        place = trainers.places[self._source.trainer]
        for number in count():
            await asyncio.sleep(SPREAD * period_s * place / trainers.owner_count)
            try:
                missing = await self._exchange.missing(place + number, step.number)
                for lane in lanes_to_help(trainers, self._source.trainer, missing, number):
                    await self._compute(step, duty, lane, header_of)
                    if self.work is not None and self.work.given_up:
                        return
            except (TriremeError, TaskFailed) as error:  # its owner meets the same error, and reports it
                log.info("help_failed", step=step.number, cause=str(error))
            next_at = step.began + period_s * 2.0 ** (number + 1)
            await asyncio.sleep(max(LEAST_LATE_S, next_at - clock.monotonic()))

    def _period_s(self, duty: Next) -> float | None:
        """How long after the step's begin others are late."""
        share_s, trainers = self._pace.share_s, self._directory.trainers
        alone = trainers.owner_count < 2 or trainers.generation != duty.generation
        if self._spec.stragglers == "off" or share_s is None or alone or self._source.trainer not in trainers:
            return None
        usual_s = usual_share_s(trainers, self._source.trainer, share_s)
        return max(LEAST_LATE_S, self._spec.straggler_factor * usual_s)

    async def _compute(self, step: Step, duty: Next, lane: int, header_of: HeaderOf) -> None:
        """Raises TaskFailed, TriremeError."""
        portion = await self._portion(step.positions[lane], duty)
        if portion is None:
            return
        self.work = work = self._pusher.work([lane], {lane: portion})
        if await self._pusher.push(step, header_of(work), work):
            work.count(step)
            log.debug("lane_helped", step=step.number, lane=lane)

    async def _portion(self, position: LanePosition, duty: Next) -> Portion | None:
        """The lane's records; None while its owner has no task there. Its end is the owner's to report, and what follows too."""
        lane = position.lane
        if position.exhausted:
            return Portion(position, position)
        loaded = is_due(self._tasks.get(lane), position)
        if loaded is None:
            task = await self._source.look(duty.generation, lane, position.epoch, position.index)
            if task is None:
                return None
            log.info("helps", lane=lane, task=task.task_id, generation=duty.generation)
            loaded = self._tasks[lane] = await self._source.load(task)
        self._tasks.move_to_end(lane)
        while len(self._tasks) > KEPT_TASKS:
            self._tasks.popitem(last=False)
        portion = portion_of(self._source, position, position, loaded)
        return Portion(portion.before, portion.after, portion.records, portion.task)
