"""Synchronous training: the steps of one trainer.

    version s ─► minibatch of each lane ─► loss ─► backward ─► push, block by block
              ─► pull version s + 1, made of the gradients of all lanes ─► swap ─► step s + 1

A lane is a fixed stream of minibatches. Each trainer computes some lanes; which trainer computes a lane changes no bit of the
result, so a trainer that has finished may also compute lanes of one that is late. Loss and backward are in
model/minibatch.py, the optimizer runs on the parameter servers. Joining the job, and what happens when members come, go,
fail or are late, is in joining.py (between steps), repair.py and helping.py (within a step).
"""

from __future__ import annotations

import asyncio
from functools import partial

from shared.checkpoints.schedule import is_final
from shared.errors import UserCodeError
from shared.lanes import Interval, step_seed
from shared.records.step import NodeResult, StepRecord, result_of
from shared.runtime import clock, telemetry
from shared.wire.messages import PushHeader
from trainer_agent.core.steps import nodes_to_compute, positions_of_step
from trainer_agent.data_plane.outbox import PushedRows
from trainer_agent.data_plane.pushes import Verdict
from trainer_agent.data_plane.step_exchange import found
from trainer_agent.loops.context import LoopContext
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.helping import LaneHelper
from trainer_agent.loops.joining import Joiner
from trainer_agent.loops.pace import Pace
from trainer_agent.loops.repair import StepRepair
from trainer_agent.loops.rows_ahead import RowsAhead
from trainer_agent.loops.step import LaneWork, Step
from trainer_agent.model.compute import Ready, node_result
from trainer_agent.tasks.held import Held
from trainer_agent.tasks.lane_reader import LaneReaders
from trainer_agent.tasks.source import TaskFailed
from trainer_agent.waiting import SingleErrorGroup

log = telemetry.logger("sync_loop")


class SyncLoop:
    """`run` until training is over, or until the next minibatch boundary once `stopping` is set."""

    def __init__(self, context: LoopContext, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._spec, self._compute, self._exchange = context.spec, context.compute, context.exchange
        self._source, self._reports, self._duty = context.source, context.reports, context.duty
        self._reports.waits_for, self._reports.given_up = lambda: evaluator.waits_for, evaluator.give_up
        self._readers = LaneReaders(context.source, lambda: context.exchange.fleet.generation)
        self._joiner = Joiner(context, self._readers, evaluator)
        self._ahead = RowsAhead(context.compute, context.exchange.rows.lookup)
        self.pace = Pace()
        helper = LaneHelper(context, self.pace, self._push)
        self._repair = StepRepair(context, self._readers, self._joiner, self._push, helper)

    def __repr__(self) -> str:
        return f"<SyncLoop: {self._joiner!r}>"

    @property
    def timeline(self) -> int:
        return self._joiner.timeline

    @property
    def busy(self) -> bool:
        """Whether gradients are being computed or are not acknowledged yet."""
        return self._repair.busy

    def held(self) -> list[Held]:
        """See LaneReader.held."""
        return self._readers.held()

    async def run(self) -> None:
        async with SingleErrorGroup() as self._prefetching:
            while await self._joiner.wait_for_lanes() and await self._joiner.attempt(self._train):
                pass
            self._readers.keep((0, 0))
            self._ahead.drop()
        await self._reports.tell_whole()

    async def _train(self) -> None:
        self._ahead.drop()
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
                contribution = group.create_task(self._repair.contribute(step))  # calls _push
                wanted = self._reports.steps.missing_from
                following = await self._exchange.pull(step.number + 1, results_from=wanted)
                given_up = await self._repair.settle(contribution)
        if given_up is not None:
            self._fetch_ahead(step, given_up)
        following = found(following, step.number + 1)
        step.times.pulled()
        await self._exchange.use_next()
        if is_final(following, self._spec.epochs):
            # with its last task training is over, and nobody makes this step again
            await self._exchange.settle(following.version)
        self._report(step, following, wanted)
        return following

    async def _push(self, step: Step, header: PushHeader, work: LaneWork) -> bool:
        """Compute the lanes, and push each block as soon as it is finished. True if all blocks are acknowledged."""
        work.rests.clear()
        try:
            async with self._exchange.pushing(header, work.outboxes) as verdicts:
                if not work.computed:
                    await self._compute_unless_given_up(step, work)
        finally:
            work.rests.set()
        return set(verdicts.values()) <= {Verdict.ACKNOWLEDGED}

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
        """Forward and backward of each lane's minibatch. A node is a group of lanes whose mean gradient is pushed as one."""
        if not self._exchange.makes_steps_again:
            self._compute.forget_nodes()
        tables = bool(self._compute.layout.tables)
        if tables:
            self._compute.read_rows(partial(self._exchange.rows.lookup, step.number))
        for node in nodes_to_compute(work.lanes):
            samples = partial(self._compute.samples, node)
            told = partial(self._result_of, work, node)
            finished = work.outboxes.adder(node, samples, partial(self._compute.contribution, node), told)
            for lane in range(*node):
                portion, seed = work.portions[lane], step_seed(self._spec.seed, step.number, lane)
                try:
                    with self.pace.lane(bool(portion.records)), step.times.computing():
                        ready = await self._ready(step, work, lane)
                        work.results[lane] = await self._compute.gradient(
                            node, lane, seed, portion.records, finished, ready
                        )
                    if tables:
                        result, rows = work.results[lane], self._compute.lane_rows()
                        pushed = PushedRows(rows, result.records, node_result(result))
                        work.outboxes.add_rows(
                            lane, pushed, self._exchange.router.row_parts(work.outboxes.routes, rows)
                        )
                except UserCodeError as error:
                    if portion.task is None:
                        raise
                    raise TaskFailed(portion.task, error, f"step {step.number}, lane {lane}") from error
                self._reports.notice(work.results[lane], step=step.number, lane=lane)
        work.outboxes.close()
        work.computed = True
        self._fetch_ahead(step, work)

    async def _ready(self, step: Step, work: LaneWork, lane: int) -> Ready | None:
        """This lane's minibatch; the rows of the next one are asked for."""
        seed = partial(step_seed, self._spec.seed, step.number)
        ready = await self._ahead.ready(lane, step.number, seed(lane), work.portions[lane].records)
        if (following := next((each for each in work.lanes if each > lane), None)) is not None:
            records = work.portions[following].records
            self._ahead.ask(following, step.number, seed(following), records, self._prefetching)
            await asyncio.sleep(0)  # it is collated before this lane is computed: both need the thread
        return ready

    def _result_of(self, work: LaneWork, node: Interval) -> NodeResult:
        """Of the node whose last lane is being computed; some of its blocks are finished."""
        lanes = [*(work.results[lane] for lane in range(node[0], node[1] - 1)), self._compute.result()]
        found = result_of(node, {(lane, lane + 1): node_result(each) for lane, each in enumerate(lanes, node[0])})
        assert found is not None
        return found

    def _fetch_ahead(self, step: Step, work: LaneWork) -> None:
        """The next task of each lane whose task ends in this step; the rows that the first of the next step's minibatches looks up."""
        for lane, portion in work.portions.items():
            if portion.finishes:
                self._readers[lane].prefetch(portion.after, self._prefetching)
        first = work.lanes[0]
        if (following := self._readers.next(first, work.portions[first].after)) is not None:
            seed = step_seed(self._spec.seed, step.number + 1, first)
            self._ahead.ask(first, step.number + 1, seed, following.records, self._prefetching)

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
