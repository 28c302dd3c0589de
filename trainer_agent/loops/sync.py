"""The synchronous training loop (training.md; the protocol is that of the design's models/sync_protocol.py).

    join: every block at the lowest version in force
    step s, for each generation until version s + 1 is whole:
        missing lanes = mine - acknowledged ─► gradients, node by node ─► pushed block by block
        meanwhile version s + 1 is pulled into the staging vector
    version s + 1 whole ─► swap; tasks finished in s are complete          GONE ─► forget, join again
    the job went back to a checkpoint (another timeline) ─► forget parameters, positions and tasks, join again

The version is all the state there is: any trainer that has it can compute any lane of the step and gets the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.errors import DeadlineExceeded, Gone, StaleGeneration, StepTorn, UserCodeError
from shared.lanes import Interval, step_seed
from shared.membership.directory import Directory
from shared.records import CompleteTask, JobSpec, Mode, StepMetrics, Task
from shared.records.step import LanePosition, LaneZero, StepRecord
from shared.runtime import telemetry
from shared.wire.messages import PushBlock, PushHeader
from trainer_agent.data_plane.transfer import Outbox, Transfer
from trainer_agent.loops.duties import (
    Duty,
    Next,
    Verdict,
    asked_in_step,
    next_duty,
    nodes_to_compute,
    positions_of_step,
)
from trainer_agent.loops.timeline import RolledBack, on_timeline, timeline_of
from trainer_agent.model.compute import Compute, LaneResult
from trainer_agent.script.user_module import failure_of
from trainer_agent.tasks.lane_reader import (
    LaneReader,
    Portion,
    TaskFailed,
    TaskSource,
    TrainingOver,
    described,
)
from trainer_agent.tasks.reports import Reports
from trainer_agent.waiting.task_errors import single_error

SETTLE_S = 10.0
TORN_S = 60.0
IDLE_S = 30.0
REFRESH_S = 0.5

log = telemetry.logger("loop")


@dataclass
class Round:
    """Some lanes of one step, computed by this trainer: what was pushed, and can be pushed again under a new generation."""

    lanes: list[int]
    portions: dict[int, Portion]
    outboxes: dict[int, Outbox]
    results: dict[int, LaneResult] = field(default_factory=dict)
    computed: bool = False


class SyncLoop:
    """`run` until training is over. `stopping` set: leaves at the next minibatch boundary."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Directory,
        compute: Compute,
        transfer: Transfer,
        source: TaskSource,
        reports: Reports,
        stopping: asyncio.Event,
    ) -> None:
        self._spec, self._directory, self._compute, self._transfer = spec, directory, compute, transfer
        self._payloads = compute.layout.payloads(spec.gradient_dtype)
        self._source, self._reports, self._stopping = source, reports, stopping
        self._readers: dict[int, LaneReader] = {}
        self._record: StepRecord | None = None
        self.timeline = timeline_of(directory)
        self._lane_zero: tuple[int, LaneZero] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<SyncLoop of {self._source.trainer}: version {self._record.version if self._record else 'none'}>"

    def held(self) -> list[tuple[Task, int]]:
        """The tasks at hand and the minibatches of each that were handed out."""
        return [held for reader in self._readers.values() if (held := reader.held) is not None]

    @property
    def busy(self) -> bool:
        """Whether gradients are being computed or are not acknowledged yet."""
        return not self._idle.is_set()

    async def run(self) -> None:
        with single_error():
            async with asyncio.TaskGroup() as self._background:
                while (await self._duty()).duty is Duty.TRAIN:
                    try:
                        await self._advance()
                    except RolledBack as error:
                        log.info("rolled_back", cause=str(error))
                    except Gone as error:
                        log.info("joining_again", cause=error.message)
                        self._record = None
                    except StaleGeneration:
                        await self._directory.changed(self._directory.revision, REFRESH_S)
                    except TaskFailed as failed:
                        await self._report(failed)
                    except TrainingOver:
                        break
                for reader in self._readers.values():
                    reader.drop()

    async def _advance(self) -> None:
        """Join if need be, then steps as long as there is nothing else to do, all in one timeline. Raises RolledBack, Gone,
        TaskFailed, TrainingOver."""
        timeline = timeline_of(self._directory)
        if timeline != self.timeline:
            self.timeline, self._record, self._lane_zero = timeline, None, None
            self._keep_readers((0, 0))
        with single_error():
            await on_timeline(self._directory, timeline, self._steps())

    async def _steps(self) -> None:
        record = self._record or await self._join()
        while timeline_of(self._directory) == self.timeline:
            self._record = record
            if self._stopping.is_set() or self._view().duty is not Duty.TRAIN:
                return
            record = await self._step(record)

    async def _duty(self) -> Next:
        """What to do; waits as long as there is nothing to do but the job goes on. A spare forgets its parameters."""
        said = ""
        while not self._stopping.is_set():
            following = self._view()
            if following.duty is not Duty.WAIT:
                return following
            self._record = None
            if following.reason != said:
                said = following.reason
                log.info("waiting", what=said)
            await self._directory.changed(self._directory.revision, REFRESH_S)
        return Next(Duty.LEAVE, "asked to stop")

    async def _join(self) -> StepRecord:
        """All blocks at the lowest version in force. Raises Gone if it is overtaken."""
        version = min(info.lowest for info in await self._transfer.infos(self.timeline))
        with single_error():
            record = await self._transfer.pull(version)
        if record is None:
            raise Gone(f"no parameter server keeps the reader positions of version {version}")
        self._compute.swap()
        if record.lane_zero is not None:
            self._compute.restore(record.lane_zero)
        self._lane_zero = None
        log.info("joined", version=version, generation=self._transfer.generation)
        return record

    # ------------------------------------------------------------ one step

    async def _step(self, record: StepRecord) -> StepRecord:
        """From a version to the next one. Raises Gone, TaskFailed, TrainingOver."""
        step, positions = record.version, positions_of_step(record.positions)
        if positions[0].epoch >= self._spec.epochs:
            await self._announce_end(positions[0].epoch)
        if self._lane_zero is None or self._lane_zero[0] != step:
            asked = asked_in_step(self._directory.checkpoint_request, self._transfer.generation, step, record.asked)
            self._lane_zero = step, self._compute.begin_step().model_copy(update={"asked": asked})
        shares: dict[int, tuple[Portion, LaneResult]] = {}
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as group:
                contributing = group.create_task(self._contribute(step, positions, self._lane_zero[1], shares))
                following = await self._transfer.pull(step + 1)
                await self._settled(contributing)
        finally:
            self._idle.set()
        if following is None:
            raise Gone(f"no parameter server keeps the reader positions of version {step + 1}")
        self._compute.swap()
        self._committed(step, positions[0].epoch, shares)
        return following

    async def _announce_end(self, epoch: int) -> None:
        """Asking for the epoch after the last one tells the master that everything is committed."""
        lane = min(self._readers, default=0)
        await self._source.acquire(self._transfer.generation, lane, epoch)
        raise TrainingOver

    async def _contribute(
        self,
        step: int,
        positions: Sequence[LanePosition],
        lane_zero: LaneZero,
        shares: dict[int, tuple[Portion, LaneResult]],
    ) -> None:
        """Compute and push this trainer's lanes of the step, again for each generation, until cancelled."""
        acknowledged: set[int] = set()
        done: Round | None = None
        while True:
            duty = self._view()
            missing = [lane for lane in range(*duty.lanes) if lane not in acknowledged]
            if missing:
                self._idle.clear()
                self._keep_readers(duty.lanes)
                try:
                    if done is None or done.lanes != missing or not done.computed:
                        done = await self._prepare(missing, positions)
                    if await self._push_round(step, duty.generation, lane_zero, done):
                        acknowledged.update(missing)
                        shares.update((lane, (portion, done.results[lane])) for lane, portion in done.portions.items())
                except StaleGeneration as error:
                    log.info("generation_stale", step=step, generation=duty.generation, cause=error.message)
            self._idle.set()
            await self._other_duty(duty, IDLE_S if acknowledged.issuperset(missing) else REFRESH_S)

    async def _prepare(self, lanes: list[int], positions: Sequence[LanePosition]) -> Round:
        """The lanes' records, before anything is computed: the pushes open with where the lanes will stand.

        Mostly all are at hand: computing then begins without a turn of the event loop, in which the pull would be sent first.
        """
        at_hand = {lane: self._reader(lane).at_hand(positions[lane]) for lane in lanes}
        portions = {lane: portion for lane, portion in at_hand.items() if portion is not None}
        if len(portions) < len(lanes):
            with single_error():
                async with asyncio.TaskGroup() as group:
                    reading = {
                        lane: group.create_task(self._reader(lane).at(positions[lane]))
                        for lane in lanes
                        if lane not in portions
                    }
            portions = {lane: portions.get(lane) or reading[lane].result() for lane in lanes}
        return Round(lanes, portions, {index: Outbox() for index in self._transfer.routes.blocks})

    async def _push_round(self, step: int, generation: int, lane_zero: LaneZero, work: Round) -> bool:
        """True if each block of each node is acknowledged by its parameter server."""
        header = PushHeader(
            **{**self._transfer.envelope(), "generation": generation},
            mode=Mode.SYNC,
            trainer=self._source.trainer,
            step=step,
            positions=tuple(portion.after for portion in work.portions.values()),
            lane_zero=lane_zero if 0 in work.lanes else None,
        )
        await self._claim(header, work)
        with single_error():
            async with asyncio.TaskGroup() as group:
                pushes = [group.create_task(self._transfer.push(i, header, box)) for i, box in work.outboxes.items()]
                if not work.computed:
                    await self._gradients(step, work)
        return all(push.result() is Verdict.ACKNOWLEDGED for push in pushes)

    async def _claim(self, header: PushHeader, work: Round) -> None:
        """Lanes that go on behind a discarded task: its data may be at some blocks already, or on its way there. Every
        parameter server must promise to take none of it before any is given the next task's. Raises RolledBack."""
        skipped = [lane for lane, portion in work.portions.items() if portion.skipped]
        if not skipped:
            return
        positions = tuple(work.portions[lane].after for lane in skipped)
        lane_zero = header.lane_zero if 0 in skipped else None
        claim = header.model_copy(update={"claim": True, "positions": positions, "lane_zero": lane_zero})
        try:
            with single_error():
                await self._transfer.claim(claim)
        except StepTorn as error:
            log.warning("step_torn", step=header.step, cause=error.message)
            timeline = self.timeline
            await self._directory.wait_for(
                lambda seen: timeline_of(seen) != timeline, TORN_S, "the job to go back behind a torn step"
            )
            raise RolledBack(error.message) from error

    async def _gradients(self, step: int, work: Round) -> None:
        """Node by node, lane by lane; each block goes into its outbox when Compute tells that backward has finished it."""
        self._compute.forget_nodes()
        portions, owners = work.portions, self._transfer.routes.owners
        for node in nodes_to_compute(work.lanes):
            count = sum(len(portions[lane].records or ()) for lane in range(*node))

            def finished(block: int, node: Interval = node, count: int = count) -> None:
                dtype = self._payloads[block]
                item = PushBlock.model_construct(block=block, lanes=node, count=count, dtype=dtype)
                work.outboxes[owners[block]].add(item, self._compute.contribution(node, block))

            for lane in range(*node):
                portion = portions[lane]
                seed = step_seed(self._spec.seed, step, lane)
                try:
                    work.results[lane] = await self._compute.gradient(node, lane, seed, portion.records, finished)
                except UserCodeError as error:
                    if portion.task is None:
                        raise
                    raise TaskFailed(portion.task, error) from error
        for outbox in work.outboxes.values():
            outbox.close()
        work.computed = True
        for lane, portion in portions.items():
            if portion.finishes:
                self._reader(lane).prefetch(portion.after, self._background)

    # ------------------------------------------------------------ around a step

    async def _settled(self, contributing: asyncio.Task[None]) -> None:
        """The version is whole: let the answers to our own pushes come in, then end the step."""
        if self.busy:
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("push_unanswered", seconds=SETTLE_S)
        contributing.cancel()

    def _view(self) -> Next:
        return next_duty(self._directory.state, self._directory.lanes, self._source.trainer, self._spec.mode)

    async def _other_duty(self, duty: Next, limit_s: float) -> None:
        """Wait until the directory says something else, at most `limit_s`: lost news is asked for again."""
        with contextlib.suppress(DeadlineExceeded):
            await self._directory.wait_for(lambda _: self._view() != duty, limit_s, "a new generation")

    def _committed(self, step: int, epoch: int, shares: dict[int, tuple[Portion, LaneResult]]) -> None:
        """Everybody has the step's effect: report this trainer's share and the tasks that ended in it."""
        results = [result for _, result in shares.values()]
        records = sum(result.records for result in results)
        if records:
            loss_sum = sum(result.loss_sum for result in results)
            self._reports.share(StepMetrics(step=step, epoch=epoch, loss_sum=loss_sum, records=records))
        for portion, _ in shares.values():
            if portion.finishes and portion.task is not None:
                self._complete(portion.task)
        log.debug("step_committed", step=step, epoch=epoch)

    def _complete(self, task: Task) -> None:
        done = CompleteTask(
            trainer=self._source.trainer,
            attempt=task.attempt,
            records=task.count,
            epoch=task.epoch,
            timeline=task.timeline,
        )
        self._reports.complete(task, done)

    def _keep_readers(self, lanes: Interval) -> None:
        for lane in [lane for lane in self._readers if not lanes[0] <= lane < lanes[1]]:
            self._readers.pop(lane).drop()

    def _reader(self, lane: int) -> LaneReader:
        if lane not in self._readers:
            self._readers[lane] = LaneReader(lane, self._source, lambda: self._transfer.generation)
        return self._readers[lane]

    async def _report(self, failed: TaskFailed) -> None:
        """The master decides whether the task is tried again, discarded, or the job fails."""
        log.warning("task_failed", task=failed.task.task_id, attempt=failed.task.attempt, cause=str(failed.error))
        for reader in self._readers.values():
            if reader.held is not None and reader.held[0].task_id == failed.task.task_id:
                reader.drop()
        failure = failure_of(failed.error, task=described(failed.task), trainer=self._source.trainer)
        await self._source.fail(failed.task, failure)
