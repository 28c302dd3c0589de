"""What each lane reads: its tasks one after the other, its minibatches by position, the next task fetched ahead.

    LanePosition ──at──► Portion(records, where the lane stands after them)
         | another index: acquire the task from the master, read its records in the executor
         +─ skip ─► next index       exhausted ─► no records       end ─► TrainingOver

A lane can be taken over at any position: what is not at hand is acquired and read again, in the same order of records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import CallerError, DatasetError, StaleAttempt, TriremeError
from shared.records import AcquireTask, CompleteTask, FailTask, JobSpec, TakeNext, Task, TaskAnswer, UserFailure
from shared.records.step import LanePosition
from shared.runtime import ids, telemetry
from trainer_agent.model.compute import Offload, Records, T
from trainer_agent.tasks.data import Reader, Shard, minibatch_indices, open_dataset
from trainer_agent.tasks.source import MasterPort
from trainer_agent.waiting.retry import persist

log = telemetry.logger("tasks")


class TrainingOver(Exception):
    """The master says that all epochs are done."""


class TaskFailed(Exception):
    """A task's records could not be read, or the user's code failed on them."""

    def __init__(self, task: Task, error: TriremeError) -> None:
        super().__init__(f"task {task.task_id} attempt {task.attempt}: {error}")
        self.task, self.error = task, error


@dataclass(frozen=True, slots=True)
class Portion:
    """A lane's share of one step. `finishes`: these are the last records of `task`. `skipped`: a discarded task was passed,
    whose data blocks may have been given in this very step."""

    before: LanePosition
    after: LanePosition
    records: Records | None = None
    task: Task | None = None
    finishes: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """A task at hand, with its records."""

    task: Task
    shard: Shard


class TaskSource:
    """Tasks of a job for one trainer: acquired from the master, read by the dataset's reader."""

    def __init__(self, spec: JobSpec, master: MasterPort, trainer: str, offload: Offload) -> None:
        self.spec, self.trainer = spec, trainer
        self._master, self._offload = master, offload
        self._readers: dict[str, Reader] = {}

    async def acquire(
        self, generation: int, stream: int | None = None, epoch: int = 0, index: int = 0, *, request: str = ""
    ) -> TaskAnswer:
        """One answer of the master that is not "wait"; `request`: asked before. Raises StaleGeneration, DeadlineExceeded,
        Conflict."""
        ask = AcquireTask(
            trainer=self.trainer,
            request=request or ids.new_id("task"),
            generation=generation,
            stream=stream,
            epoch=epoch,
            index=index,
        )
        what = f"a task for {'anybody' if stream is None else f'lane {stream}'}"
        while True:
            answer = await persist(lambda: self._master.acquire_task(ask), what)
            if answer.answer != "wait":
                return answer
            await asyncio.sleep(ids.jitter(answer.retry_after_s or 0.2))

    async def complete(self, task: Task, done: CompleteTask, following: TakeNext | None = None) -> Task | None:
        """`task` is done; with `following` the next one, if there is one at once: else `acquire` that very request."""
        report = done.model_copy(update={"next": following})
        try:
            what = f"completing task {task.task_id}"
            return (await persist(lambda: self._master.complete_task(task.task_id, report), what)).next
        except StaleAttempt as error:
            log.info("report_refused", task=task.task_id, cause=error.message)
            return None

    async def read(self, task: Task) -> Shard:
        """The records of a task. Raises TaskFailed."""
        try:
            return await self._offload(self._read, task)
        except DatasetError as error:
            raise TaskFailed(task, error) from error

    def _read(self, task: Task) -> Shard:
        reader = self._readers.get(task.kind)
        if reader is None:
            evaluation = task.kind == "EVALUATE" and self.spec.evaluation_dataset is not None
            dataset = self.spec.evaluation_dataset if evaluation else self.spec.dataset
            assert dataset is not None
            reader = self._readers[task.kind] = open_dataset(dataset)
        return reader.read(task.file, task.first, task.count, task.offset)

    def minibatch(self, held: Holding, number: int) -> Records:
        """Minibatch `number` of a task, in the order of (seed, epoch, task)."""
        task, spec = held.task, self.spec
        indices = minibatch_indices(
            spec.seed,
            task.epoch,
            int(task.task_id.rpartition("-")[2]),
            len(held.shard),
            spec.minibatch_size,
            number,
            shuffle=spec.shuffle and task.kind == "TRAIN",
        )
        return held.shard.minibatch(indices)

    async def fail(self, task: Task, failure: UserFailure) -> None:
        """Tell the master that this attempt failed; what happens to the task is its decision."""
        failed = FailTask(
            trainer=self.trainer, attempt=task.attempt, failure=failure, epoch=task.epoch, timeline=task.timeline
        )
        try:
            await persist(
                lambda: self._master.fail_task(task.task_id, failed), f"reporting that task {task.task_id} failed"
            )
        except CallerError:  # not the pending attempt (any more), but the error is real
            await persist(lambda: self._master.report_failure(self.trainer, failure), "reporting a failure")


class LaneReader:
    """One lane. Not concurrent with itself: `at` and `prefetch` are called by one loop."""

    def __init__(self, lane: int, source: TaskSource, generation: Callable[[], int]) -> None:
        self._lane, self._source, self._generation = lane, source, generation
        self._held: Holding | None = None
        self._next: asyncio.Task[Holding | None] | None = None
        self._done = 0

    @property
    def held(self) -> tuple[Task, int] | None:
        """The task at hand and the minibatches of it that were handed out."""
        return (self._held.task, self._done) if self._held else None

    def at_hand(self, position: LanePosition) -> Portion | None:
        """As `at`, if the task at hand has the records, or the one fetched ahead: nobody has to be asked."""
        if position.exhausted:
            return None
        held = _due(self._held, position) or self._arrived(position)
        return None if held is None else self._portion(position, position, held)

    async def at(self, position: LanePosition) -> Portion:
        """The lane's records at `position`. Raises TrainingOver, TaskFailed, StaleGeneration, DeadlineExceeded."""
        before = position
        while not position.exhausted:
            held = _due(self._held, position)
            if held is None:
                found = await self._fetched(position)
                if isinstance(found, LanePosition):
                    position = found
                    continue
                held = self._held = found
            return self._portion(before, position, held)
        self._held = None
        return Portion(before, position, skipped=position.index != before.index)

    def prefetch(self, position: LanePosition, group: asyncio.TaskGroup) -> None:
        """The lane's next step starts a new task: acquire and read it meanwhile."""
        if self._next is None and not position.exhausted:
            self._next = group.create_task(self._ahead(position))

    def drop(self) -> None:
        """Forget the task at hand: the attempt is over, or somebody else has the lane."""
        self._held = None
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _arrived(self, position: LanePosition) -> Holding | None:
        """The task that was fetched ahead, if that is over and it is the one at `position`: it is at hand from now on."""
        if self._next is None or not self._next.done() or self._next.cancelled():
            return None
        ahead = _due(self._next.result(), position)
        if ahead is not None:
            self._held, self._next = ahead, None
        return ahead

    async def _fetched(self, position: LanePosition) -> Holding | LanePosition:
        """The task at `position`; or the position to go on from, if there is none."""
        if self._next is not None:
            ahead = _due(await outcome_of(self._next), position)
            self._next = None
            if ahead is not None:
                return ahead
        answer = await self._source.acquire(self._generation(), self._lane, position.epoch, position.index)
        return await self._settle(answer, position)

    async def _settle(self, answer: TaskAnswer, position: LanePosition) -> Holding | LanePosition:
        match answer.answer:
            case "task":
                assert answer.task is not None
                return Holding(answer.task, await self._source.read(answer.task))
            case "skip":
                return position.model_copy(
                    update={
                        "index": position.index + 1,
                        "offset": 0,
                        "exhausted": position.index + 1 >= answer.stream_length,
                    }
                )
            case "end":
                raise TrainingOver
            case _:
                return position.model_copy(update={"offset": 0, "exhausted": True})

    async def _ahead(self, position: LanePosition) -> Holding | None:
        """None if anything stands in the way: then `at` asks again, and hears the reason."""
        try:
            answer = await self._source.acquire(self._generation(), self._lane, position.epoch, position.index)
            found = await self._settle(answer, position)
        except (TriremeError, TaskFailed, TrainingOver):
            return None
        return found if isinstance(found, Holding) else None

    def _portion(self, before: LanePosition, position: LanePosition, held: Holding) -> Portion:
        number = position.offset // self._source.spec.minibatch_size
        records = self._source.minibatch(held, number)
        self._done = number + 1
        offset = position.offset + len(records)
        finishes = offset >= len(held.shard)
        if finishes:
            over = position.index + 1 >= held.task.stream_length
            after = position.model_copy(update={"index": position.index + 1, "offset": 0, "exhausted": over})
        else:
            after = position.model_copy(update={"offset": offset})
        return Portion(before, after, records, held.task, finishes, position.index != before.index)


def _due(held: Holding | None, position: LanePosition) -> Holding | None:
    """It, if it is the task at `position`."""
    there = held is not None and (held.task.epoch, held.task.index) == (position.epoch, position.index)
    return held if there else None


async def outcome_of(task: asyncio.Task[T]) -> T | None:
    """What a background task found, None if it was cancelled; being cancelled here leaves it running."""
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def described(task: Task) -> str:
    """For people: `task 7 (train.parquet records 512-1023)`."""
    if not task.file:
        return f"task {task.task_id}"
    return f"task {task.task_id} ({task.file} records {task.first}-{task.first + task.count - 1})"
