"""Synchronous training by one trainer: its steps, how it joins them, and what deaths and delays of others
change in them.

    version s ─► minibatch of each lane ─► loss ─► backward ─► push, block by block
              ─► pull version s + 1, made of the gradients of all lanes ─► swap ─► step s + 1

SyncLoop      makes one step after the other
Joiner        between steps: takes the version in force, and takes it again after what ends the steps
StepRepair    within a step: this trainer's lanes, in one generation after the other
LaneHelper    within a step: lanes of others that are late

A lane is a fixed stream of minibatches. Each trainer computes some lanes; which trainer computes a lane
changes no bit of the result, so a trainer that has finished may also compute lanes of one that is late. Loss
and backward are in model/minibatch.py, lanes are computed and pushed in lane_pusher.py. Who steps the
parameters is behind StepExchange: parameter servers, or all trainers of a collective job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

from trainer_agent.core.duties import (
    Duty,
    Next,
    checkpoint_asked,
    ends_epoch,
    lanes_to_help,
    positions_of_step,
    usual_share_s,
)
from trainer_agent.data_plane.step_exchange import found
from trainer_agent.loops.context import LoopContext, RolledBack, on_timeline, timeline_of
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.lane_pusher import LanePusher, LaneWork, Step
from trainer_agent.model.compute import BeforeStep, lanes_differ
from trainer_agent.model.schedule import advance
from trainer_agent.tasks.activity import Held, LanePace
from trainer_agent.tasks.lane_reader import LaneReaders, Portion, is_due, number_at, portion_of
from trainer_agent.tasks.source import LoadedTask, TaskFailed, TrainingOver
from trainer_agent.waiting import SingleErrorGroup, backoff_s
from trireme_shared.checkpoints.schedule import is_final
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    FrozenDiffer,
    Gone,
    InvalidArgument,
    StaleGeneration,
    StepTorn,
    TriremeError,
)
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import LanePosition, LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import PushHeader

SETTLE_S = 10.0
TORN_S = 60.0
IDLE_S = 30.0
REFRESH_S = 0.5
KEPT_TASKS = 8
LEAST_LATE_S = 0.05  # shorter delays are jitter
SPREAD = 0.1  # of the time between rounds: within it the trainers ask one after the other
HeaderOf = Callable[[LaneWork], PushHeader]
log = telemetry.logger("sync_loop")


class SyncLoop:
    """`run` until training is over, or until the next minibatch boundary once `stopping` is set. `initial`:
    what the script's optimizer and scheduler begin with."""

    def __init__(self, context: LoopContext, initial: LaneZero, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._spec, self._compute, self._exchange = context.spec, context.compute, context.exchange
        self._source, self._reports, self._duty = context.source, context.reports, context.duty
        self._readers = LaneReaders(context.source, lambda: context.exchange.fleet.generation)
        self._joiner = Joiner(context, self._readers, initial, evaluator)
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
                if not self._joiner.may_go_on(version):  # it may have waited
                    return
                try:
                    version = await self._step(version)
                except FrozenDiffer as error:
                    number, kind = int(error.details["parameter"]), str(error.details.get("kind"))
                    told = lanes_differ(self._compute.places, number, kind)
                    raise InvalidArgument(told, step=version.version) from error

    async def _step(self, version: StepRecord) -> StepRecord:
        """One optimizer update of the whole model: from `version` to the next one. Raises Gone, TaskFailed,
        TrainingOver."""
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
        """The step is committed: report it, if this trainer owns lane 0, and the tasks that ended in it.
        `wanted`: results from this step on were asked for."""
        if (metrics := step.metrics(self.timeline)) is not None:
            self._reports.count(metrics)
        first, end = self._duty().lanes
        # after the last step nobody has lanes any more
        if first == 0 < end or (not end and 0 in step.shares):
            self._reports.whole(following, self.timeline, self._exchange.grad_norm)
            if wanted is not None:
                self._reports.steps.filled(self._exchange.results, wanted)
        else:
            self._reports.steps.clear()
        self._reports.spent(step.number, self.timeline, clock.monotonic() - step.began, step.times)
        for task in step.finished_tasks():
            self._reports.complete(task, self._source.completion(task))
        log.debug("step_committed", step=step.number, epoch=step.positions[0].epoch)


class Joiner:
    """How a trainer joins a synchronous job, and joins again after what ends its steps.

        wait for lanes ─► pull every block at the lowest version in force ─► steps
        version gone, or too late for it ─► pull again (not the first time: after a pause)
        task failed ─► report it             generation stale ─► look again
        the job went back to a checkpoint (another timeline)
            ─► forget parameters, positions and tasks, pull again

    `timeline` is the one that the parameters in use belong to."""

    def __init__(
        self, context: LoopContext, readers: LaneReaders, initial: LaneZero, evaluator: Evaluator
    ) -> None:
        self._evaluator, self._spec, self._initial = evaluator, context.spec, initial
        self._directory, self._compute, self._exchange = context.directory, context.compute, context.exchange
        self._source, self._readers, self._stopping = context.source, readers, context.stopping
        self._duty = context.duty
        self._version: StepRecord | None = None
        self._lane_zero: tuple[int, LaneZero] | None = None
        self._gone = 0  # attempts in a row that ended so, without a step
        self.timeline = timeline_of(self._directory)

    def __repr__(self) -> str:
        return (
            f"<Joiner of {self._source.trainer}: version "
            f"{self._version.version if self._version else 'none'}>"
        )

    async def wait_for_lanes(self) -> bool:
        """Wait until this trainer has lanes; False if it has nothing to train any more. While it waits it is
        a spare, and forgets its parameters."""
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
        """Run `steps` in the job's timeline until they return, or until something happens that joining again
        mends. False if training is over."""
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
            log.warning(
                "task_failed", task=failed.task.task_id, attempt=failed.task.attempt, cause=str(failed.error)
            )
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
                    await self._restore_schedule(record, record.lane_zero)
                self._lane_zero = None
                log.info("joined", version=record.version, generation=self._exchange.fleet.generation)
            yield record

    async def _restore_schedule(self, record: StepRecord, saved: LaneZero) -> None:
        """Scheduler and options as after the step that made this version. If the user has accepted another
        optimizer or scheduler since, they are as if training had begun with it."""
        if saved.options_change == self._spec.options_change:
            self._compute.restore(saved)
            return
        self._compute.restore(self._initial)
        per_epoch = self._spec.schedule_per == "epoch"
        await advance(self._compute, record.positions[0].epoch if per_epoch else record.version)

    def may_go_on(self, version: StepRecord) -> bool:
        """`version` is in use now: whether this trainer goes on to its next step."""
        if timeline_of(self._directory) != self.timeline:
            return False
        if self._version is not None and self._version is not version:  # a step was made
            self._gone = 0
        self._version = version
        return not self._stopping.is_set() and self._duty().duty is Duty.TRAIN

    def begin_step(self, version: StepRecord) -> LaneZero:
        """What lane 0's push says. The schedule advances once for a step, even if the step is begun several
        times. Raises Gone: this version is overtaken."""
        step = version.version
        if self._lane_zero is None or self._lane_zero[0] != step:
            request = self._directory.checkpoint_request or self._exchange.checkpoint_again()
            generation = self._exchange.fleet.generation
            asked = checkpoint_asked(request, generation, step, version.asked, self.timeline)
            place = step, positions_of_step(version.positions)[0].epoch
            plateau = self._evaluator.plateau_value(version)
            before = BeforeStep(ends_epoch(version.positions), plateau, version=version, step_and_epoch=place)
            begun = self._compute.begin_step(before)
            change = self._spec.options_change
            self._lane_zero = step, begun.with_fields(asked=asked, options_change=change)
        return self._lane_zero[1]


class StepRepair:
    """One synchronous step whatever happens meanwhile: this trainer's lanes are computed, pushed and
    acknowledged.

        for each generation until the next version is whole:
            missing lanes = mine - acknowledged ─► records ─► claim, if a task was discarded ─► push
                ─► acknowledged
            then, while others are late: their lanes too (LaneHelper)

    Lanes that are computed already are only pushed again. A trainer that gets more lanes in a new generation
    computes those. Who is late itself gives its lanes up as soon as the version is whole: another trainer has
    computed them."""

    def __init__(
        self,
        context: LoopContext,
        readers: LaneReaders,
        joiner: Joiner,
        pusher: LanePusher,
        helper: LaneHelper,
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
        """Push this trainer's lanes of the step, again for each generation, until cancelled. Raises
        TaskFailed, RolledBack."""
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
                    log.info(
                        "generation_stale", step=step.number, generation=duty.generation, cause=error.message
                    )
            self._idle.set()
            if step.there >= set(missing):
                await self._help(step, duty)
            else:
                await self._other_duty(duty, REFRESH_S)

    async def _push_lanes(self, step: Step, duty: Next, missing: list[int]) -> bool:
        """What is computed is pushed again, the rest is computed. False: that was given up, others have
        pushed it."""
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
        """The next version is whole: wait for the answers to our own pushes, then end the step. Own lanes
        that are not computed are given up, because others have pushed them; they are answered."""
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
        """Before a lane goes on behind a discarded task: some blocks may have got that task's data, or it is
        on its way. Every parameter server must promise to take none of it before any gets the next task's
        data. Raises RolledBack."""
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
                    timeline_of(view) != timeline
                    or (again and self._exchange.fleet.generation > header.generation)
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


class LaneHelper:
    """Lanes of others that are late: a trainer that has finished its own computes them too, while it waits
    for the version.

        own lanes acknowledged ─► `straggler_factor` times the usual time has passed
            ─► one parameter server is asked which lanes are missing
            ─► those this trainer is the helper of (core/duties.py)
                ─► task, if not known: one look at the queue ─► compute, push

    Whoever comes first has contributed; the parameter servers acknowledge the other push as a duplicate. Both
    have the same bits. The rounds come at 1, 2, 4, … times that time after the step's begin, each with other
    helpers and another parameter server to ask. `work` is the last lane of another trainer that it
    computed."""

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
        """The lane's records; None while its owner has no task there. Its end is the owner's to report, and
        what follows too."""
        lane = position.lane
        if position.exhausted:
            return Portion(position, position)
        loaded = is_due(self._tasks.get(lane), position)
        if loaded is None:
            task = await self._source.look(duty.generation, lane, position.epoch, position.index)
            if task is None:
                return None
            log.info("helps", lane=lane, task=task.task_id, generation=duty.generation)
            loaded = self._tasks[lane] = self._source.opened(task) or await self._source.load(task)
        self._tasks.move_to_end(lane)
        while len(self._tasks) > KEPT_TASKS:
            self._tasks.popitem(last=False)
        await self._source.ready(loaded, number_at(position, self._source))
        portion = portion_of(self._source, position, position, loaded)
        return Portion(portion.before, portion.after, portion.records, portion.task)
