"""Between steps: how a trainer joins a synchronous job, and joins again after what ends its steps.

wait for lanes ─► pull every block at the lowest version in force ─► steps
version gone, or too late for it ─► pull again (not the first time: after a pause)      task failed ─► report it      generation stale ─► look again
the job went back to a checkpoint (another timeline) ─► forget parameters, positions and tasks, pull again
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from trainer_agent.core.duties import Duty
from trainer_agent.core.steps import checkpoint_asked, ends_epoch
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.timeline import RolledBack, on_timeline, timeline_of
from trainer_agent.model.compute import BeforeStep
from trainer_agent.tasks.lane_reader import LaneReaders
from trainer_agent.tasks.source import TaskFailed, TrainingOver
from trainer_agent.waiting import backoff_s
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import Gone, StaleGeneration
from trireme_shared.protocol.records.step import LaneZero, StepRecord

REFRESH_S = 0.5

log = telemetry.logger("joining")


class Joiner:
    """`timeline`: the one that the parameters in use belong to."""

    def __init__(self, context: LoopContext, readers: LaneReaders, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._directory, self._compute, self._exchange = context.directory, context.compute, context.exchange
        self._source, self._readers, self._stopping = context.source, readers, context.stopping
        self._duty = context.duty
        self._version: StepRecord | None = None
        self._lane_zero: tuple[int, LaneZero] | None = None
        self._gone = 0  # attempts in a row that ended so, without a step
        self.timeline = timeline_of(self._directory)

    def __repr__(self) -> str:
        return f"<Joiner of {self._source.trainer}: version {self._version.version if self._version else 'none'}>"

    async def wait_for_lanes(self) -> bool:
        """Wait until this trainer has lanes; False if it has nothing to train any more. While it waits it is a spare, and
        forgets its parameters."""
        waiting_for = ""
        while not self._stopping.is_set():
            duty = self._duty()
            if duty.duty is not Duty.WAIT:
                return duty.duty is Duty.TRAIN
            self._version = None
            if duty.reason != waiting_for:
                waiting_for = duty.reason
                log.info("waiting", what=waiting_for)
            await self._evaluator.as_spare()
        return False

    async def attempt(self, steps: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run `steps` in the job's timeline until they return, or until something happens that joining again mends. False if
        training is over."""
        timeline = timeline_of(self._directory)
        if timeline != self.timeline:
            self.timeline, self._version, self._lane_zero = timeline, None, None
            self._readers.keep((0, 0))
        try:
            await on_timeline(self._directory, timeline, steps())
        except RolledBack as error:
            log.info("rolled_back", cause=str(error))
        except Gone as error:
            log.info("joining_again", cause=error.message)
            self._version = None
            if self._gone:
                await asyncio.sleep(ids.jitter(backoff_s(self._gone)))
            self._gone += 1
        except StaleGeneration as error:
            log.info("generation_stale", cause=error.message)
            await self._directory.changed(self._directory.revision, REFRESH_S)
        except TaskFailed as failed:
            log.warning("task_failed", task=failed.task.task_id, attempt=failed.task.attempt, cause=str(failed.error))
            self._readers.drop(failed.task)
            await self._source.fail(failed.task, failed.error, failed.place)
        except TrainingOver:
            return False
        return True

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[StepRecord]:
        """Give the version in use, as StepExchange.joined does; steps are made in the block."""
        async with self._exchange.joined(self.timeline, self._version) as record:
            if record is not self._version:
                if record.lane_zero is not None:
                    self._compute.restore(record.lane_zero)
                self._lane_zero = None
                log.info("joined", version=record.version, generation=self._exchange.fleet.generation)
            yield record

    def may_go_on(self, version: StepRecord) -> bool:
        """`version` is in use now: whether this trainer goes on to its next step."""
        if timeline_of(self._directory) != self.timeline:
            return False
        if self._version is not None and self._version is not version:  # a step was made
            self._gone = 0
        self._version = version
        return not self._stopping.is_set() and self._duty().duty is Duty.TRAIN

    def begin_step(self, version: StepRecord) -> LaneZero:
        """What lane 0's push says. The schedule advances once for a step, even if the step is begun several times. Raises Gone: this version
        is overtaken."""
        step = version.version
        if self._lane_zero is None or self._lane_zero[0] != step:
            request = self._directory.checkpoint_request or self._exchange.checkpoint_again()
            generation = self._exchange.fleet.generation
            asked = checkpoint_asked(request, generation, step, version.asked, self.timeline)
            before = BeforeStep(ends_epoch(version.positions), self._evaluator.plateau_value(version))
            self._lane_zero = step, self._compute.begin_step(before).with_fields(asked=asked)
        return self._lane_zero[1]
