"""Tasks of a job for one trainer: acquired from the master, their records read in the executor, completed or
failed.

acquire ─► Task | end     read ─► LoadedTask ──minibatch(number)──► Records     complete, fail ─► the master
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainer_agent.data import Blaming, Shard, blaming, minibatch_in, open_dataset
from trainer_agent.data.in_code import EVALUATION, reading
from trainer_agent.data.shard import Indices, record_order
from trainer_agent.model.compute import Records
from trainer_agent.script.user_module import traceback_of
from trainer_agent.tasks.master import MasterPort, failure_of
from trainer_agent.waiting import Backoff, retry
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
    UserCodeError,
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
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle
from trireme_shared.protocol.records.step import LanePosition
from trireme_shared.protocol.records.tasks import WAITS_FOR_CHARACTERS, BegunWork

WAIT_S = 10.0  # the master answers as soon as there is a task
READS_AHEAD = 2  # at once, so that what is waited for finds a thread of the process's readers
READ_LIMIT_S = 120.0
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
    """A task with its records in memory. `order`: in which they are trained; None: as they are.
    `generation`: in which this trainer asked for the task (asynchronous). `following`: see TaskAnswer."""

    task: Task
    shard: Shard
    order: Indices | None = None
    generation: int = 0
    following: Task | None = None


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
    ) -> None:
        """`warn`: tells the user a sentence."""
        self._by_columns = by_columns
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
        backoff, tries = Backoff(f"reading {described(task)}", READ_LIMIT_S), 0
        offload = self._alone if task.alone else self.offload
        while True:
            try:
                return await self._read_in(offload, task)
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
                return await self._read_in(self.offload, task)
            except TriremeError as error:
                log.info("not_read_ahead", task=task.task_id, cause=str(error))
                return None

    async def _read_in(self, offload: Offload, task: Task) -> LoadedTask:
        loaded = await offload(self._load, task)
        while self._changed:
            self._warn(self._changed.popleft())
        return loaded

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
        for held_out, dataset in ((False, self.spec.dataset), (True, self.spec.evaluation_dataset)):
            if isinstance(dataset, MapStyle | IterableStyle):
                with contextlib.suppress(TriremeError):
                    await self.offload(self._make, held_out, dataset.reader)
                    if not held_out:
                        self._compare(dataset.reader, self._reader(held_out=False).loader_settings)

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
        if not self.spec.shuffle or task.kind != "TRAIN":
            return LoadedTask(task, shard)
        number = int(task.task_id.rpartition("-")[2])
        return LoadedTask(task, shard, record_order(self.spec.seed, task.epoch, number, len(shard)))

    def _read(self, task: Task) -> Shard:
        evaluates = task.kind in ("EVALUATE", "VALIDATE")
        reader = self._reader(held_out=evaluates and self.spec.evaluation_dataset is not None)
        with reading(EVALUATION if evaluates else task.epoch):
            return reader.read(task.file, task.first, task.count, task.offset, task.stamp)

    def minibatch(self, loaded: LoadedTask, number: int) -> Records:
        """Minibatch `number` of a task, in the order of (seed, epoch, task)."""
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
        request. Sums that the master does not take end the job: another attempt gives the same ones."""
        report = done.with_fields(next=following)
        try:
            what = f"completing task {task.task_id}"
            return (await retry(lambda: self._master.complete_task(task.task_id, report), what)).next
        except StaleAttempt as error:
            log.info("report_refused", task=task.task_id, cause=error.message)
            return None
        except (TooLarge, InvalidArgument) as error:
            if task.kind not in (TaskKind.EVALUATE, TaskKind.VALIDATE):
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


def refused_sums(error: CallerError) -> UserCodeError:
    """Sums of an evaluation that cannot be kept, or do not fit together, as an error that ends the job."""
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return UserCodeError(message, error_type=error.code, error_message=message, fatal=True)


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
