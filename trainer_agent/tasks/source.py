"""Tasks of a job for one trainer: acquired from the master, their records read in the executor, completed or
failed.

acquire ─► Task | end     read ─► LoadedTask ──minibatch(number)──► Records     complete, fail ─► the master
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol, TypeVar

from trainer_agent.data import Blaming, Shard, blaming, minibatch_in, minibatches_in, open_dataset
from trainer_agent.data.in_code import EVALUATION, reading
from trainer_agent.data.shard import Indices, ItemShard, record_order
from trainer_agent.model.compute import Records
from trainer_agent.reading.messages import Asked
from trainer_agent.reading.pool import ReadingProcesses
from trainer_agent.script.user_module import traceback_of
from trainer_agent.tasks.master import MasterPort, failure_of
from trainer_agent.tasks.parts import Parts
from trainer_agent.waiting import Backoff, SingleErrorGroup, retry
from trireme_shared.platform.runtime import begun, ids, telemetry
from trireme_shared.protocol.errors import (
    CallerError,
    DatasetError,
    DeadlineExceeded,
    InvalidArgument,
    PeerError,
    StaleAttempt,
    TooLarge,
    TriremeError,
)
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    JobSpec,
    TakeNext,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
)
from trireme_shared.protocol.records.datasets import Dataset, IterableStyle, MapStyle
from trireme_shared.protocol.records.queue import refused_sums
from trireme_shared.protocol.records.step import LanePosition
from trireme_shared.protocol.records.tasks import WAITS_FOR_CHARACTERS, BegunWork

WAIT_S = 10.0  # the master answers as soon as there is a task
READS_AHEAD = 2  # at once, so that what is waited for finds a thread of the process's readers
READ_LIMIT_S = 120.0
AHEAD_OF_EACH = 2  # minibatches that a process of ReadingProcesses has, or that wait for it
T = TypeVar("T")
log = telemetry.logger("tasks")


class TrainingOver(Exception):
    """The master says that all epochs are done."""


class TaskFailed(Exception):
    """A task's records could not be read, or the user's code failed on them. `place`: which of them, as
    text."""

    def __init__(self, task: Task, error: TriremeError, place: str = "") -> None:
        super().__init__(f"task {task.task_id} attempt {task.attempt}: {error}")
        self.task, self.error, self.place = task, error, place


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task with its records in memory, or that come (Parts). `order`: in which a Shard is trained; None:
    as it is.
    `generation`: in which this trainer asked for the task (asynchronous). `following`: see TaskAnswer."""

    task: Task
    shard: Shard | Parts
    order: Indices | None = None
    generation: int = 0
    following: Task | None = None

    def has(self, number: int) -> bool:
        """Whether minibatch `number` is there."""
        return not isinstance(self.shard, Parts) or self.shard.has(number)

    def comes_after(self, first: int) -> bool:
        """Whether minibatches from `first` on are to be read ahead."""
        return isinstance(self.shard, Parts) and not self.shard.given_up and bool(self.shard.missing(first))


class TaskSource:
    """All of it is retried until the master or the reader answers. `alone`: runs work while nothing is
    computed; None: as `offload`. `by_columns`: nobody asks for records one by one."""

    def __init__(
        self,
        spec: JobSpec,
        master: MasterPort,
        trainer: str,
        offload: Offload,
        alone: Offload | None = None,
        warn: Callable[[str], object] = log.info,
        *,
        by_columns: bool = False,
        processes: ReadingProcesses | None = None,
    ) -> None:
        """`warn`: tells the user a sentence. `processes`: read the objects of the script."""
        self._by_columns, self._processes = by_columns, processes
        self.spec, self.trainer = spec, trainer
        self._warn = warn
        # what readers, in their threads, say of files that are trained all the same
        self._changed = deque[str]()
        self._master, self.offload, self._alone = master, offload, alone or offload
        self._reads_ahead = asyncio.Semaphore(READS_AHEAD)
        self._readers: dict[bool, Blaming] = {}  # of the records that are held out, and of the others

    async def acquire(
        self,
        generation: int,
        stream: int | None = None,
        epoch: int = 0,
        index: int = 0,
        *,
        request: str = "",
        stopped: tuple[LanePosition, ...] = (),
    ) -> TaskAnswer:
        """The master's first answer that is not "wait". `request`: the id of an earlier request, to repeat
        that one. Raises StaleGeneration, DeadlineExceeded, Conflict."""
        ask = AcquireTask(
            trainer=self.trainer,
            request=request or ids.new_id("task"),
            generation=generation,
            stream=stream,
            epoch=epoch,
            index=index,
            stopped=stopped,
            wait_s=WAIT_S,
        )
        what = f"a task for {'any trainer' if stream is None else f'lane {stream}'}"
        while True:
            answer = await retry(lambda: self._master.acquire_task(ask), what)
            if answer.answer != "wait":
                return answer
            await asyncio.sleep(ids.jitter(answer.retry_after_s or 0.2))

    async def acquire_beside(self, generation: int, awaited: int) -> TaskAnswer:
        """The master's answer, also "wait". `awaited`: the evaluation that training waits for here; 0: it
        does not. Raises as `acquire`."""
        ask = AcquireTask(
            trainer=self.trainer,
            request=ids.new_id("task"),
            generation=generation,
            epoch=awaited,
            beside=True,
            wait_s=WAIT_S,
        )
        return await retry(lambda: self._master.acquire_task(ask), "a task of an evaluation")

    async def look(self, generation: int, stream: int, epoch: int, index: int) -> Task | None:
        """Which task another trainer's lane has at that place; None unless that trainer has it now. One
        attempt. Raises StaleGeneration, PeerError."""
        ask = AcquireTask(
            trainer=self.trainer,
            request=ids.new_id("look"),
            generation=generation,
            stream=stream,
            epoch=epoch,
            index=index,
            look=True,
        )
        return (await self._master.acquire_task(ask)).task

    async def load(self, task: Task) -> LoadedTask:
        """A task with its records. Raises TaskFailed; ResourceExhausted, StorageUnreachable if this machine
        or the dataset's storage has not let it read for READ_LIMIT_S: that is no failure of the task, and
        another trainer may be able to read it. Until then the master is told that the task waits, since one
        whose trainer is silent counts as failed."""
        if (opened := self.opened(task)) is None:
            return await self._retried(task, lambda: self._read_in(self._offload_of(task), self._load, task))
        async with SingleErrorGroup() as group:
            group.create_task(self.read_on(opened))
            for number in range(minibatches_in(task.count, self.spec.minibatch_size)):
                await self.ready(opened, number)
        return opened

    def opened(self, task: Task) -> LoadedTask | None:
        """A task whose records can be read one by one (those of an object of the script): none is read yet.
        None: its records are read together."""
        if not isinstance(self._dataset_of(task), MapStyle):
            return None
        order = partial(self._order_of, task, task.count) if self._shuffles(task) else None
        return LoadedTask(task, Parts(task.first, task.count, self.spec.minibatch_size, order))

    async def ready(self, loaded: LoadedTask, number: int) -> None:
        """Until minibatch `number` is there. Raises as `load`."""
        parts = loaded.shard
        if not isinstance(parts, Parts):
            return
        while not parts.has(number):
            if parts.is_under_way(number):
                await parts.changed()
            else:
                await self._retried(loaded.task, lambda: self._read_part(loaded.task, parts, [number]))

    async def read_on(self, loaded: LoadedTask, first: int = 0) -> None:
        """Read the minibatches from `first` on, ahead of whoever needs them. What fails is left to `ready`,
        and then it is an attempt that fails."""
        task, parts = loaded.task, loaded.shard
        if not isinstance(parts, Parts) or (task.alone and self._processes is None):
            return

        async def one_after_the_other() -> None:
            while not parts.given_up and (missing := parts.missing(first)):
                try:
                    await self._read_part(task, parts, missing if self._processes is None else missing[:1])
                except TriremeError as error:
                    parts.given_up = True
                    log.info("not_read_ahead", task=task.task_id, cause=str(error))

        if self._processes is None:
            async with self._reads_ahead:
                await one_after_the_other()
            return
        async with SingleErrorGroup() as group:
            for _ in range(AHEAD_OF_EACH * self._processes.count):
                group.create_task(one_after_the_other())

    async def _read_part(self, task: Task, parts: Parts, numbers: list[int]) -> None:
        """These minibatches, one after the other; a process reads one alone."""
        with parts.reading(numbers) as ended:
            if self._processes is None:
                tell = partial(asyncio.get_running_loop().call_soon_threadsafe, parts.tell)
                work = self._read_numbers, task, parts, numbers, tell, ended
                await self._read_in(self._offload_of(task), *work)
                return
            asked = await self.offload(self._asked, task, parts, numbers[0])
            shard = await self._processes.read(asked)
            while self._processes.told:
                self._warn(self._processes.told.popleft())
            if isinstance(shard, ItemShard):
                shard.collate = await self.offload(self._collate_of, task)
            parts.put(numbers[0], shard)

    async def _retried(self, task: Task, read: Callable[[], Awaitable[T]]) -> T:
        """See `load`."""
        backoff, tries = Backoff(f"reading {described(task)}", READ_LIMIT_S), 0
        while True:
            try:
                return await read()
            except DatasetError as error:
                if error.__cause__ is not None:
                    error.details["traceback"] = traceback_of(error.__cause__, Path(self.spec.script).parent)
                raise TaskFailed(task, error) from error
            except PeerError as error:
                tries += 1
                await self._tell_waiting(task, tries, error)
                try:
                    await backoff.failed(error)
                except DeadlineExceeded:
                    raise error from None

    async def read_ahead(self, task: Task) -> LoadedTask | None:
        """As `load`, for a task that is not acquired yet. None if its records cannot be read now: `load` will
        meet the same error, and then it is an attempt that fails."""
        async with self._reads_ahead:
            try:
                return await self._read_in(self.offload, self._load, task)
            except TriremeError as error:
                log.info("not_read_ahead", task=task.task_id, cause=str(error))
                return None

    async def _read_in(self, offload: Offload, read: Callable[..., T], *arguments: Any) -> T:
        found = await offload(read, *arguments)
        while self._changed:
            self._warn(self._changed.popleft())
        return found

    def _offload_of(self, task: Task) -> Offload:
        return self._alone if task.alone else self.offload

    async def _tell_waiting(self, task: Task, tries: int, error: PeerError) -> None:
        """It is told again with the next try if it is lost."""
        waits = TaskProgress(
            trainer=self.trainer,
            attempt=task.attempt,
            minibatches=0,
            work=tries,
            epoch=task.epoch,
            timeline=task.timeline,
            waits_for=error.message[:WAITS_FOR_CHARACTERS],
        )
        with contextlib.suppress(TriremeError):
            await self._master.report_progress(task.task_id, waits)

    async def make_datasets(self) -> None:
        """Make the objects of the script's code (what `dataset()` gives) before this trainer is a member:
        that may take minutes, and keep the interpreter, so that no lease could be renewed. What fails is told
        with the first task."""
        if self._processes is not None:
            with contextlib.suppress(TriremeError):
                await self._processes.begun()
                if isinstance(self.spec.dataset, MapStyle):
                    self._compare(self.spec.dataset.reader, self._processes.settings)
        for held_out, dataset in ((False, self.spec.dataset), (True, self.spec.evaluation_dataset)):
            if isinstance(dataset, MapStyle) and self._processes is not None:
                continue
            if isinstance(dataset, MapStyle | IterableStyle):
                with contextlib.suppress(TriremeError):
                    await self.offload(self._make, held_out, dataset.reader)
                    taken = self._reader(held_out=held_out).taken
                    if taken is not None and not held_out:
                        self._compare(dataset.reader, taken.settings)

    def _compare(self, name: str, settings: Mapping[str, Any]) -> None:
        """Tell what the DataLoader called `name` says otherwise than the job: a job that is created by REST
        states its settings itself."""
        for setting, value in settings.items():
            mine = getattr(self.spec, setting)
            if mine != value:
                self._warn(
                    f"the job has {setting} = {mine}, and the DataLoader of {name} says {value}: the job's "
                    f"counts; to train as the DataLoader says, create the job with {setting} = "
                    f"{str(value).lower()}"
                )

    def _make(self, held_out: bool, name: str) -> None:
        self._reader(held_out=held_out).read(name, 0, 0)  # no record, but the object is made

    def _reader(self, *, held_out: bool) -> Blaming:
        """The reader of the evaluation dataset, or of the one that is trained. Raises DatasetError."""
        reader = self._readers.get(held_out)
        if reader is None:
            dataset = self.spec.evaluation_dataset if held_out else self.spec.dataset
            assert dataset is not None
            reader = self._readers[held_out] = open_dataset(
                dataset,
                self.spec.seed,
                self._changed.append if self.spec.changed_files == "report" else None,
                named=self._by_columns,
            )
        return reader

    def _load(self, task: Task) -> LoadedTask:
        with begun.at(BegunWork.of(task).to_bytes()):
            shard = self._read(task)
            if self._by_columns:
                with blaming(task.file, task.first, task.count):
                    shard.keep_columns()
        order = self._order_of(task, len(shard)) if self._shuffles(task) else None
        return LoadedTask(task, shard, order)

    def _read_numbers(
        self, task: Task, parts: Parts, numbers: list[int], tell: Callable[[], object], ended: Event
    ) -> None:
        """In a thread, which tells the event loop of each minibatch and goes on: coming back for each would
        let the reading stand still in between."""
        reader = self._reader(held_out=self._is_held_out(task))
        for number in numbers:
            asked = self._asked(task, parts, number)
            with begun.at(BegunWork.of(task).to_bytes()), reading(asked.epoch):
                shard = reader.chosen(asked.file, asked.numbers, asked.stamp)
                if self._by_columns:
                    with blaming(task.file, task.first, task.count):
                        shard.keep_columns()
            if ended.is_set():
                return
            parts.put(number, shard)
            tell()

    def _asked(self, task: Task, parts: Parts, number: int) -> Asked:
        records = parts.records_of(number)
        return Asked(self._is_held_out(task), self._epoch_of(task), task.file, records, task.stamp)

    def _collate_of(self, task: Task) -> Callable[[list[Any]], Any] | None:
        """That of the DataLoader, for items that no process has collated."""
        taken = self._reader(held_out=self._is_held_out(task)).taken
        return taken.collate if taken is not None else None

    def _read(self, task: Task) -> Shard:
        reader = self._reader(held_out=self._is_held_out(task))
        with reading(self._epoch_of(task)):
            return reader.read(task.file, task.first, task.count, task.offset, task.stamp)

    def _is_held_out(self, task: Task) -> bool:
        return self._evaluates(task) and self.spec.evaluation_dataset is not None

    @staticmethod
    def _evaluates(task: Task) -> bool:
        return task.kind in ("EVALUATE", "VALIDATE")

    def _epoch_of(self, task: Task) -> int:
        return EVALUATION if self._evaluates(task) else task.epoch

    def _dataset_of(self, task: Task) -> Dataset:
        held_out = self.spec.evaluation_dataset if self._evaluates(task) else None
        return held_out if held_out is not None else self.spec.dataset

    def _shuffles(self, task: Task) -> bool:
        return self.spec.shuffle and task.kind == "TRAIN"

    def _order_of(self, task: Task, count: int) -> Indices:
        return record_order(self.spec.seed, task.epoch, int(task.task_id.rpartition("-")[2]), count)

    def minibatch(self, loaded: LoadedTask, number: int) -> Records:
        """Minibatch `number` of a task, in the order of (seed, epoch, task); of Parts one that is there."""
        if isinstance(loaded.shard, Parts):
            found = loaded.shard.minibatch(number)
        else:
            indices = minibatch_in(loaded.order, len(loaded.shard), self.spec.minibatch_size, number)
            found = loaded.shard.minibatch(indices)
        found.work = BegunWork.of(loaded.task, number).to_bytes()
        return found

    def completion(self, task: Task, **more: Any) -> CompleteTask:
        """The report that `task` is done; `more`: what CompleteTask says beside that."""
        return CompleteTask(
            trainer=self.trainer,
            attempt=task.attempt,
            records=task.count,
            epoch=task.epoch,
            timeline=task.timeline,
            **more,
        )

    async def complete(
        self, task: Task, done: CompleteTask, following: TakeNext | None = None
    ) -> Task | None:
        """`task` is done. With `following`: the next task if the master has one at once; else `acquire` that
        request. Sums and metrics that the master does not take end the job: another attempt gives the same
        ones."""
        report = done.with_fields(next=following)
        try:
            what = f"completing task {task.task_id}"
            return (await retry(lambda: self._master.complete_task(task.task_id, report), what)).next
        except StaleAttempt as error:
            log.info("report_refused", task=task.task_id, cause=error.message)
            return None
        except (TooLarge, InvalidArgument) as error:
            if task.kind is TaskKind.TRAIN:
                raise
            await self.fail(task, refused_sums(error))
            return None

    async def fail(self, task: Task, error: TriremeError, place: str = "") -> None:
        """This attempt failed. The master decides whether the task is tried again, discarded, or the job
        fails."""
        where = ", ".join(filter(None, (described(task), place)))
        failure = failure_of(error, task=where, trainer=self.trainer)
        failed = FailTask(
            trainer=self.trainer,
            attempt=task.attempt,
            failure=failure,
            epoch=task.epoch,
            timeline=task.timeline,
        )
        try:
            await retry(
                lambda: self._master.fail_task(task.task_id, failed),
                f"reporting that task {task.task_id} failed",
            )
        except CallerError:  # it is not the pending attempt (any more), but the error is real
            await retry(lambda: self._master.report_failure(self.trainer, failure), "reporting a failure")


def described(task: Task) -> str:
    """For people: `task 7 (train.parquet records 512-1023)`."""
    if not task.file:
        return f"task {task.task_id}"
    return f"task {task.task_id} ({task.file} records {task.first}-{task.first + task.count - 1})"


async def outcome_of(task: asyncio.Task[T]) -> T | None:
    """The result of a background task, None if it was cancelled. Cancelling the caller leaves the task
    running."""
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


class Offload(Protocol):
    """Runs blocking work (reading files) away from the event loop; a simulation runs it at once."""

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T: ...
