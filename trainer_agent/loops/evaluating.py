"""Evaluations while the job trains: tasks over the evaluation dataset, with the parameters of a checkpoint, a
minibatch at a time.

    run (beside the loops):  task acquired ─► checkpoint and records read ─► [minibatches] ─► reported
    the loops, when no gradient is being computed:  between_steps │ as a spare │ until_settled
        ─► one minibatch of that task

Spares evaluate. If there are none, every trainer does, one minibatch between two steps. Training is not
changed by a bit: the parameters are a second set of values, and all else that a minibatch may change is set
before each one that is trained. Asynchronous: every trainer evaluates, one minibatch between two pushes, and
as many as it can while it has no task of training.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer_agent.data import evaluation_seed, minibatches_in
from trainer_agent.loops.context import LoopContext, timeline_of
from trainer_agent.model.compute import Compute
from trainer_agent.tables.whole_tables import read_tables
from trainer_agent.tasks.activity import Held
from trainer_agent.tasks.source import LoadedTask, TaskFailed, TaskSource
from trainer_agent.waiting import retry
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import (
    CallerError,
    CheckpointUnusable,
    PeerError,
    StaleGeneration,
    StorageUnreachable,
    TooLarge,
    TriremeError,
    UserCodeError,
)
from trireme_shared.protocol.evaluations import (
    Evaluation,
    EvaluationStatus,
    RunningEvaluation,
    evaluation_of,
    evaluations_before,
    plateau_value,
)
from trireme_shared.protocol.records import (
    EvaluationSums,
    JobSpec,
    TakeNext,
    Task,
    TaskKind,
    ValidationSums,
)
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.metric_states import MetricState, Sum, merged
from trireme_shared.protocol.records.queue import refused_sums
from trireme_shared.protocol.records.step import StepRecord

STORAGE_TRIES = 4
T = TypeVar("T")
LOOK_S = 0.5
PAUSE_S = 0.5
PATIENCE_S = 30.0
log = telemetry.logger("evaluating")


@dataclass
class TaskSums:
    """The sums over the minibatches of one task, the first ones first. `done`: how many. `room`: bytes that
    values which are kept for each record may still take. All sums are written as JSON only when that is used
    up, so many minibatches cost no more each than a few do."""

    loaded: LoadedTask
    total: int
    done: int = 0
    room: int = 0
    sums: dict[str, Sum] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedTask, spec: JobSpec) -> TaskSums:
        return cls(loaded, minibatches_in(len(loaded.shard), spec.minibatch_size))

    @property
    def complete(self) -> bool:
        return self.done >= self.total

    async def next(self, source: TaskSource, compute: Compute, *, pinned: bool = False) -> None:
        """In place: one more minibatch. Raises UserCodeError; a fatal one if no master would take its
        sums."""
        number, task = self.done, self.loaded.task
        records = source.minibatch(self.loaded, number)
        seed = evaluation_seed(source.spec.seed, int(task.task_id.rpartition("-")[2]), number)
        found = await compute.evaluate(records, seed, pinned=pinned)
        try:
            for name, value in found.items():
                self.sums[name] = merged(name, self.sums.get(name), value)
            states = [value for value in found.values() if isinstance(value, MetricState)]
            self.room -= sum(state.growing_bytes for state in states)
            if states and (self.room < 0 or number == 0):
                self.room = EvaluationSums(sums=self.sums).room()
        except CallerError as error:
            raise refused_sums(error) from error
        self.done = number + 1


class _Work:
    """What the loops have to compute of a task, a piece at a time: `piece()` says whether that was the last
    one."""

    def __init__(self, task: Task, piece: Callable[[], Awaitable[bool]]) -> None:
        self.task, self._piece = task, piece
        self.pieces, self.is_under_way = 0, False
        self.over = asyncio.Event()
        self.error: UserCodeError | None = None

    async def next(self) -> bool:
        """One piece. Whether it is over."""
        self.is_under_way = True
        try:
            over = await self._piece()
        except UserCodeError as error:
            self.error, over = error, True
        finally:
            self.is_under_way = False
        self.pieces += 1
        if over:
            self.over.set()
        return over


class Evaluator:
    """Of one trainer. Run `run()`; the other methods are called by one loop at a time."""

    def __init__(self, context: LoopContext) -> None:
        self._context, self._spec, self._directory = context, context.spec, context.directory
        self._source, self._compute, self._etcd = context.source, context.compute, context.etcd
        self._work: _Work | None = None
        self._pinned: CheckpointRef | None = None
        context.activity.evaluator = self
        self._loading: Task | None = None
        self._loaded = 0  # blocks and pieces of tables, for that task
        self._awaited = 0  # the evaluation that this trainer waits for
        self._result: Evaluation | None = None  # of an evaluation that the status has forgotten
        # there is something to do, or the job has changed
        self._for_loops, self._for_run = asyncio.Event(), asyncio.Event()
        if context.spec.evaluate_every is not None:
            context.directory.observers.append(self._look_again)

    def __repr__(self) -> str:
        return f"<Evaluator {self._source.trainer}: {self._work.task.task_id if self._work else 'no task'}>"

    def _look_again(self) -> None:
        self._for_loops.set()
        self._for_run.set()

    @property
    def status(self) -> EvaluationStatus:
        """Of the job's present timeline."""
        status, timeline = self._directory.evaluation, timeline_of(self._directory)
        return (
            status
            if status is not None and status.timeline == timeline
            else EvaluationStatus(timeline=timeline)
        )

    def held(self) -> list[Held]:
        """The task being evaluated."""
        if self._loading is not None:
            return [Held(self._loading, 0, self._loaded)]
        return [Held(self._work.task, self._work.pieces)] if self._work is not None else []

    @property
    def waits_for(self) -> str:
        """Before the next step; "": for no evaluation. If the master gave up the task that is evaluated here,
        this trainer may hang."""
        if self._task is not None and self._task in self._context.activity.given_up:
            return ""
        if self._work is not None and self._work.is_under_way:
            return "it computes a minibatch of an evaluation"
        return f"evaluation {self._awaited} is not over" if self._awaited > self.status.settled else ""

    @property
    def _task(self) -> Task | None:
        return self._work.task if self._work is not None else self._loading

    # ------------------------------------------------------------ called by the loops

    async def between_steps(self, version: StepRecord) -> None:
        """`version` is in use. At a version that is evaluated: until the evaluation before it is over. Else
        one minibatch at most."""
        number = evaluation_of(version, self._spec.evaluate_every, self._spec.epochs)
        if number is not None:
            await self.until_settled(number - 1, self._context.exchange.version_stays)
            await self._read_result(number - 1)
        elif self._work is not None:
            await self._next_piece(self._work)

    async def between_pushes(self) -> None:
        """Of asynchronous training: one minibatch at most."""
        if self._work is not None:
            await self._next_piece(self._work)

    async def until_done(self, task: asyncio.Task[Any]) -> None:
        """Evaluate until `task` is done: there is nothing to train."""
        if self._spec.evaluate_every is None:
            await asyncio.wait([task])
            return
        task.add_done_callback(lambda _: self._for_loops.set())
        while not task.done():
            await self.for_a_while()

    def stops_at(self, version: StepRecord) -> bool:
        """Whether training ends at this version, as stop_early says. All trainers know it once
        `between_steps` has returned."""
        return self.status.stops_before(evaluation_of(version, self._spec.evaluate_every, self._spec.epochs))

    def plateau_value(self, version: StepRecord) -> float | None:
        """What ReduceLROnPlateau is told at this version: see BeforeStep.metric. The same for all trainers,
        and for who comes back to it. Raises Gone: it is overtaken."""
        name, number = (
            self._spec.plateau_metric,
            evaluation_of(version, self._spec.evaluate_every, self._spec.epochs),
        )
        if name is None or number is None:
            return None
        value = plateau_value(self.status, number, name, self._result)
        if value is not None and math.isnan(value):
            log.warning("no_plateau_metric", evaluation=number - 1, metric=name)
        return value

    async def _read_result(self, number: int) -> None:
        """For `plateau_value`, if the status has forgotten it: a collective job goes on from an earlier
        version if all that made the later ones have died."""
        if self._spec.plateau_metric is None or number < 1 or self.status.result(number) is not None:
            return
        key = self._directory.keys.evaluation_result(number)
        found = await retry(lambda: self._etcd.get(key), f"the result of evaluation {number}")
        self._result = read_record(Evaluation, key, found.value) if found is not None else None

    async def after_training(self, version: StepRecord | None) -> None:
        """Until all evaluations before the last version are over. Asynchronous: until the one that runs is;
        no other begins any more."""
        if version is not None:
            await self.until_settled(evaluations_before(version, self._spec.evaluate_every))
        while (running := self.status.running) is not None and not self._context.stopping.is_set():
            await self.until_settled(running.number)

    async def until_settled(
        self, number: int, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Evaluate until evaluation `number` is over, or this trainer shall stop. `meanwhile` is awaited
        again and again."""
        try:
            while self.status.settled < number and not self._context.stopping.is_set():
                if self._awaited != number:
                    self._awaited = number
                    self._for_run.set()
                    log.info("waiting", what=f"evaluation {number}")
                if meanwhile is not None:
                    await meanwhile()
                await self.for_a_while()
        finally:
            self._awaited = 0

    async def as_spare(self) -> None:
        """While there is nothing to train: returns when the job may have changed."""
        if self._spec.evaluate_every is None:
            await self._directory.changed(self._directory.revision, LOOK_S)
        else:
            await self.for_a_while()

    async def for_a_while(self) -> None:
        """One minibatch; without a task, until there is one or the job has changed, at most LOOK_S."""
        if self._work is not None:
            await self._next_piece(self._work)
            return
        await event_within(self._for_loops, LOOK_S)
        self._for_loops.clear()

    async def _next_piece(self, work: _Work) -> None:
        async with self._context.exchange.swapping:
            # its evaluation may have ended while other parameters came into use
            over = self._work is work and await work.next()
        if over and self._work is work:
            self._work = None

    # ------------------------------------------------------------ beside the loops

    async def run(self) -> None:
        """Until cancelled."""
        if self._spec.evaluate_every is None:
            return
        while True:
            if not self._takes_part():
                if self.status.running is None and self._pinned is not None:
                    self._compute.forget_pinned()
                    self._pinned = None
                await self._until_wanted()
                continue
            try:
                answer = await self._source.acquire_beside(
                    self._context.exchange.fleet.generation, self._awaited
                )
                task = answer.task
                while task is not None:
                    task = await self._do(task)
            except TriremeError as error:
                log.info("not_evaluated", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))
            else:
                if answer.task is None:
                    await self._until_wanted()

    def _takes_part(self) -> bool:
        """Spares do, and all trainers if there are none or if training waits."""
        trainers, me = self._directory.trainers, self._source.trainer
        if me not in trainers or (self.status.running is None and not self._awaited):
            return False
        has_spares = len(trainers.names) > trainers.owner_count
        return bool(self._awaited) or not has_spares or trainers.places[me] >= trainers.owner_count

    async def _until_wanted(self) -> None:
        await event_within(self._for_run, LOOK_S)
        self._for_run.clear()

    async def _do(self, task: Task) -> Task | None:
        """The next task, if the master gave one when this one was completed. Raises TriremeError."""
        log.info("task_started", task=task.task_id, attempt=task.attempt, evaluation=task.epoch)
        try:
            sums: Mapping[str, Sum] = await (
                self._metrics(task) if task.kind is TaskKind.METRICS else self._sums(task)
            )
        except (UserCodeError, TaskFailed) as error:
            await self._source.fail(task, error.error if isinstance(error, TaskFailed) else error)
            return None
        following = TakeNext(request=ids.new_id("task"), generation=self._context.exchange.fleet.generation)
        return await self._source.complete(task, self._source.completion(task, sums=sums), following)

    async def _metrics(self, task: Task) -> dict[str, float]:
        """Of all sums. Raises UserCodeError, StaleGeneration."""
        key = self._directory.keys.validation
        read = await retry(lambda: self._etcd.get(key), "the sums of the evaluation")
        sums = must_read(ValidationSums, key, read.value).sums if read else {}
        metrics: dict[str, float] = {}

        async def compute() -> bool:
            metrics.update(await self._compute.metrics(sums) if sums else {})
            return True

        await self._done_by_loops(_Work(task, compute))
        return metrics

    async def _sums(self, task: Task) -> dict[str, Sum]:
        """Raises UserCodeError, TaskFailed, StaleGeneration, DeadlineExceeded."""
        await self._directory.wait_for(
            lambda _: self.status.number >= task.epoch, PATIENCE_S, f"evaluation {task.epoch}"
        )
        running = self._running(task)
        if self._pinned != running.ref:
            await self._load(task, running.ref)
        sums = TaskSums.of(await self._source.load(task), self._spec)

        async def compute() -> bool:
            if not sums.complete:
                await sums.next(self._source, self._compute, pinned=True)
            return sums.complete

        await self._done_by_loops(_Work(task, compute))
        return sums.sums

    def _running(self, task: Task) -> RunningEvaluation:
        """Raises StaleGeneration: the task's evaluation is over."""
        running = self.status.running
        if running is None or running.number != task.epoch:
            raise StaleGeneration(f"evaluation {task.epoch} is over")
        return running

    async def _done_by_loops(self, work: _Work) -> None:
        """Raises UserCodeError, StaleGeneration."""
        self._work = work
        self._for_loops.set()
        try:
            while not await event_within(work.over, LOOK_S):
                self._running(work.task)
        finally:
            if self._work is work:
                self._work = None
        if work.error is not None:
            raise work.error

    async def _load(self, task: Task, ref: CheckpointRef) -> None:
        """The checkpoint's values. Raises TaskFailed."""
        self._pinned, self._loading, self._loaded = None, task, 0
        try:
            await self._read(task, ref)
        finally:
            self._loading = None

    async def _read(self, task: Task, ref: CheckpointRef) -> None:
        """Raises TaskFailed."""

        def memory(block: int) -> memoryview:
            self._loaded += 1
            return self._compute.pinned(block)

        def reads() -> None:
            self._loaded += 1

        async def read() -> None:
            manifest = await self._source.offload(read_checkpoint, self._spec, ref, memory)
            if manifest.layout.tables:
                found = await self._source.offload(read_tables, self._spec.storage, ref, manifest, reads)
                self._compute.pin_rows(found)

        try:
            await read_again(read, ref)
        except (CheckpointUnusable, TooLarge) as error:
            raise TaskFailed(task, error) from error
        except (OSError, PeerError) as error:
            message = (
                f"checkpoint {ref.uuid} (step {ref.step}) could not be read {STORAGE_TRIES} times: {error}"
            )
            raise TaskFailed(task, StorageUnreachable(message)) from error
        self._pinned = ref


async def read_again(read: Callable[[], Awaitable[T]], ref: CheckpointRef) -> T:
    """What `read` gives, which reads that checkpoint: tried STORAGE_TRIES times if the storage does not
    answer. Raises what the last try raises."""
    attempt = 0
    while True:
        try:
            return await read()
        except (OSError, PeerError) as error:
            log.warning("checkpoint_unread", checkpoint=ref.uuid, step=ref.step, cause=str(error))
            attempt += 1
            if attempt == STORAGE_TRIES:
                raise
            await asyncio.sleep(ids.jitter(PAUSE_S * 2 ** (attempt - 1)))


def read_checkpoint(spec: JobSpec, ref: CheckpointRef, memory: Callable[[int], memoryview]) -> Manifest:
    """The values of all blocks. Blocks. Raises CheckpointUnusable, OSError."""
    manifest = stored.read_manifest(spec.storage, spec.job, ref)
    stored.read_values(spec.storage, ref, manifest, memory)
    return manifest
