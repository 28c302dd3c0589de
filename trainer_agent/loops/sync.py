"""Synchronous training: the steps of one trainer.

    version s ─► minibatch of each lane ─► loss ─► backward ─► push, block by block
              ─► pull version s + 1, made of the gradients of all lanes ─► swap ─► step s + 1

A lane is a fixed stream of minibatches. Each trainer computes some lanes; which trainer computes a lane changes no bit of the
result, so a trainer that has finished may also compute lanes of one that is late. Loss and backward are in
model/minibatch.py, lanes are computed and pushed in lane_pusher.py. Who steps the parameters is behind StepExchange: parameter
servers, or all trainers of a collective job. Joining the job, and what happens when members come, go, fail or are late, is in
joining.py (between steps), repair.py and helping.py (within a step).
"""

from __future__ import annotations

from trainer_agent.core.steps import positions_of_step
from trainer_agent.data_plane.step_exchange import found
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.helping import LaneHelper
from trainer_agent.loops.joining import Joiner
from trainer_agent.loops.lane_pusher import LanePusher
from trainer_agent.loops.repair import StepRepair
from trainer_agent.loops.step import Step
from trainer_agent.tasks.activity import Held, LanePace
from trainer_agent.tasks.lane_reader import LaneReaders
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.checkpoints.schedule import is_final
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records.step import StepRecord

log = telemetry.logger("sync_loop")


class SyncLoop:
    """`run` until training is over, or until the next minibatch boundary once `stopping` is set."""

    def __init__(self, context: LoopContext, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._spec, self._compute, self._exchange = context.spec, context.compute, context.exchange
        self._source, self._reports, self._duty = context.source, context.reports, context.duty
        self._readers = LaneReaders(context.source, lambda: context.exchange.fleet.generation)
        self._joiner = Joiner(context, self._readers, evaluator)
        self._pusher = LanePusher(context, self._readers)
        helper = LaneHelper(context, self._pusher)
        self._repair = StepRepair(context, self._readers, self._joiner, self._pusher, helper)

    def __repr__(self) -> str:
        return f"<SyncLoop: {self._joiner!r}>"

    @property
    def timeline(self) -> int:
        return self._joiner.timeline

    @property
    def lane_pace(self) -> LanePace:
        """How long this trainer's lanes take."""
        return LanePace(self._pusher.pace.lane_s, self._pusher.pace.least_lane_s)

    @property
    def waits_for(self) -> str:
        """See Evaluator.waits_for."""
        return self._evaluator.waits_for

    @property
    def busy(self) -> bool:
        """Whether gradients are being computed or are not acknowledged yet."""
        return self._repair.busy

    def held(self) -> list[Held]:
        """See LaneReader.held."""
        return self._readers.held()

    async def run(self) -> None:
        async with self._pusher.fetching_ahead():
            while await self._joiner.wait_for_lanes() and await self._joiner.attempt(self._train):
                pass
        await self._reports.tell_whole()

    async def _train(self) -> None:
        self._pusher.drop_ahead()
        async with self._joiner.joined() as joined:
            version = joined
            while self._joiner.may_go_on(version):
                await self._evaluator.between_steps(version)
                if self._joiner.may_go_on(version):  # it may have waited
                    version = await self._step(version)

    async def _step(self, version: StepRecord) -> StepRecord:
        """One optimizer update of the whole model: from `version` to the next one. Raises Gone, TaskFailed, TrainingOver."""
        positions = positions_of_step(version.positions)
        if positions[0].epoch >= self._spec.epochs:
            await self._exchange.settle(version.version)
            first, _ = self._duty().lanes  # lanes may have moved since the readers were made
            await self._readers.announce_end(first, positions[0].epoch)
        if self._evaluator.stops_at(version):
            await self._exchange.settle(version.version)
            first, _ = self._duty().lanes
            await self._readers.announce_stop(first, self._spec.epochs, version)
        step = Step(version.version, positions, self._joiner.begin_step(version), clock.monotonic())
        if self._exchange.makes_steps_again:
            await self._exchange.begin_step(step.number)
            self._compute.forget_nodes()
        with self._repair.contributing():
            async with SingleErrorGroup() as group:  # it may fail while the end of the group is waited for
                contribution = group.create_task(self._repair.contribute(step))
                wanted = self._reports.steps.missing_from
                following = await self._exchange.pull(step.number + 1, results_from=wanted)
                given_up = await self._repair.settle(contribution)
        if given_up is not None:
            self._pusher.fetch_ahead(step, given_up)
        following = found(following, step.number + 1)
        step.times.pulled()
        await self._exchange.use_next()
        if is_final(following, self._spec.epochs):
            # with its last task training is over, and nobody makes this step again
            await self._exchange.settle(following.version)
        self._report(step, following, wanted)
        return following

    def _report(self, step: Step, following: StepRecord, wanted: int | None) -> None:
        """The step is committed: report it, if this trainer owns lane 0, and the tasks that ended in it. `wanted`: results from this step on
        were asked for."""
        if (metrics := step.metrics(self.timeline)) is not None:
            self._reports.count(metrics)
        first, end = self._duty().lanes
        if first == 0 < end or (not end and 0 in step.shares):  # after the last step nobody has lanes any more
            self._reports.whole(following, self.timeline, self._exchange.grad_norm)
            if wanted is not None:
                self._reports.steps.filled(self._exchange.results, wanted)
        else:
            self._reports.steps.clear()
        self._reports.spent(step.number, self.timeline, clock.monotonic() - step.began, step.times)
        for task in step.finished_tasks():
            self._reports.complete(task, self._source.completion(task))
        log.debug("step_committed", step=step.number, epoch=step.positions[0].epoch)
