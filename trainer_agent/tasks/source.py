"""Tasks of a job for one trainer: acquired from the master, their records read in the executor, completed or failed.

acquire ─► Task | end     read ─► LoadedTask ──minibatch(number)──► Records     complete, fail ─► the master
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shared.errors import CallerError, DatasetError, StaleAttempt, TriremeError
from shared.records import AcquireTask, CompleteTask, FailTask, JobSpec, TakeNext, Task, TaskAnswer
from shared.records.begun import BegunWork
from shared.records.datasets import IterableStyle, MapStyle
from shared.records.step import LanePosition
from shared.runtime import begun, ids, telemetry
from trainer_agent.data import Reader, Shard, minibatch_indices, open_dataset
from trainer_agent.model.compute import Records
from trainer_agent.script.tracebacks import traceback_of
from trainer_agent.tasks.master import MasterPort, failure_of
from trainer_agent.waiting.retry import retry

WAIT_S = 10.0  # the master answers as soon as there is a task

T = TypeVar("T")
log = telemetry.logger("tasks")


class Offload(Protocol):
    """Runs blocking work (reading files) away from the event loop; a simulation runs it at once."""

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T: ...


class TrainingOver(Exception):
    """The master says that all epochs are done."""


class TaskFailed(Exception):
    """A task's records could not be read, or the user's code failed on them. `place`: which of them, as text."""

    def __init__(self, task: Task, error: TriremeError, place: str = "") -> None:
        super().__init__(f"task {task.task_id} attempt {task.attempt}: {error}")
        self.task, self.error, self.place = task, error, place


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task with its records in memory."""

    task: Task
    shard: Shard


class TaskSource:
    """All of it is retried until the master or the reader answers. `alone`: runs work while nothing is computed; None: as `offload`."""

    def __init__(
        self, spec: JobSpec, master: MasterPort, trainer: str, offload: Offload, alone: Offload | None = None
    ) -> None:
        self.spec, self.trainer = spec, trainer
        self._master, self.offload, self._alone = master, offload, alone or offload
        self._readers: dict[str, Reader] = {}

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
        """The master's first answer that is not "wait". `request`: the id of an earlier request, to repeat that one.
        Raises StaleGeneration, DeadlineExceeded, Conflict."""
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
        """The master's answer, also "wait". `awaited`: the evaluation that training waits for here; 0: it does not. Raises as `acquire`."""
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
        """Which task another trainer's lane has at that place; None unless that trainer has it now. One attempt. Raises
        StaleGeneration, PeerError."""
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

    async def read(self, task: Task) -> Shard:
        """The records of a task. Raises TaskFailed; DeadlineExceeded if the storage does not answer for too long."""
        offload = self._alone if task.alone else self.offload
        try:
            return await retry(lambda: offload(self._read, task), f"reading {described(task)}")
        except DatasetError as error:
            if error.__cause__ is not None:
                error.details["traceback"] = traceback_of(error.__cause__, Path(self.spec.script).parent)
            raise TaskFailed(task, error) from error

    async def make_datasets(self) -> None:
        """Make the objects of the script's code (what `dataset()` gives) before this trainer is a member: that may take minutes, and keep the
        interpreter, so that no lease could be renewed. What fails is told with the first task."""
        for kind, dataset in (("TRAIN", self.spec.dataset), ("EVALUATE", self.spec.evaluation_dataset)):
            if isinstance(dataset, MapStyle | IterableStyle):
                with contextlib.suppress(TriremeError):
                    await self.offload(lambda: self._reader(kind).read(dataset.reader, 0, 0))  # noqa: B023  awaited here

    def _reader(self, kind: str) -> Reader:
        """Raises DatasetError."""
        reader = self._readers.get(kind)
        if reader is None:
            evaluation = kind in ("EVALUATE", "VALIDATE") and self.spec.evaluation_dataset is not None
            dataset = self.spec.evaluation_dataset if evaluation else self.spec.dataset
            assert dataset is not None
            reader = self._readers[kind] = open_dataset(dataset)
        return reader

    def _read(self, task: Task) -> Shard:
        reader = self._reader(task.kind)
        with begun.at(BegunWork.of(task).to_bytes()):
            return reader.read(task.file, task.first, task.count, task.offset)

    def minibatch(self, loaded: LoadedTask, number: int) -> Records:
        """Minibatch `number` of a task, in the order of (seed, epoch, task)."""
        task, spec = loaded.task, self.spec
        indices = minibatch_indices(
            spec.seed,
            task.epoch,
            int(task.task_id.rpartition("-")[2]),
            len(loaded.shard),
            spec.minibatch_size,
            number,
            shuffle=spec.shuffle and task.kind == "TRAIN",
        )
        found = loaded.shard.minibatch(indices)
        found.work = BegunWork.of(task, number).to_bytes()
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

    async def complete(self, task: Task, done: CompleteTask, following: TakeNext | None = None) -> Task | None:
        """`task` is done. With `following`: the next task if the master has one at once; else `acquire` that request."""
        report = done.model_copy(update={"next": following})
        try:
            what = f"completing task {task.task_id}"
            return (await retry(lambda: self._master.complete_task(task.task_id, report), what)).next
        except StaleAttempt as error:
            log.info("report_refused", task=task.task_id, cause=error.message)
            return None

    async def fail(self, task: Task, error: TriremeError, place: str = "") -> None:
        """This attempt failed. The master decides whether the task is tried again, discarded, or the job fails."""
        where = ", ".join(filter(None, (described(task), place)))
        failure = failure_of(error, task=where, trainer=self.trainer)
        failed = FailTask(
            trainer=self.trainer, attempt=task.attempt, failure=failure, epoch=task.epoch, timeline=task.timeline
        )
        try:
            await retry(
                lambda: self._master.fail_task(task.task_id, failed), f"reporting that task {task.task_id} failed"
            )
        except CallerError:  # it is not the pending attempt (any more), but the error is real
            await retry(lambda: self._master.report_failure(self.trainer, failure), "reporting a failure")


def described(task: Task) -> str:
    """For people: `task 7 (train.parquet records 512-1023)`."""
    if not task.file:
        return f"task {task.task_id}"
    return f"task {task.task_id} ({task.file} records {task.first}-{task.first + task.count - 1})"


async def outcome_of(task: asyncio.Task[T]) -> T | None:
    """The result of a background task, None if it was cancelled. Cancelling the caller leaves the task running."""
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()
