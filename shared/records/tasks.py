"""What trainers and the dispatcher (a master, or the trainers themselves) tell each other: asks for tasks, answers, reports, losses."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from shared.records.record import Record


class UserFailure(Record):
    """An exception of the user's module. `task`: where it happened, for people (`task 7 (file.parquet rows 0-511)`)."""

    error_type: str
    message: str
    traceback: str = ""
    task: str = ""
    trainer: str = ""


class TaskKind(StrEnum):
    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    EXPORT = "EXPORT"


class Task(Record):
    """One shard of work. `task_id`: "17" (TRAIN), "evaluate-3", "export-0".

    `timeline`: the job's when it was given; reports carry it back. `index` is its place in `stream` (of `stream_length` tasks) in this epoch; `offset` is the byte at which record
    `first` starts, where the format has lines.
    """

    task_id: str
    kind: TaskKind
    attempt: int
    epoch: int = 0
    stream: int = 0
    index: int = 0
    stream_length: int = 0
    file: str = ""
    first: int = 0
    count: int = 0
    offset: int | None = None
    timeline: int = 0


class AcquireTask(Record):
    """`stream`: a lane (sync training) or None for whatever is due. In sync mode `epoch` and `index` say which task of
    the lane is wanted, and that every task of that lane before it is committed; asking for `epoch` also says that
    *all* lanes have committed the epochs before it."""

    trainer: str
    request: str
    generation: int
    stream: int | None = None
    epoch: int = 0
    index: int = 0


class TaskAnswer(Record):
    """`task`: here it is. `wait`: nothing now, ask again after `retry_after_s`. `skip`: that task is discarded, go to
    the next index. `exhausted`: the lane has no task at that index in this epoch. `end`: training (stream given) or
    the whole job (stream None) is over."""

    answer: Literal["task", "wait", "skip", "exhausted", "end"]
    reason: str = ""
    retry_after_s: float = 0.0
    task: Task | None = None
    stream_length: int = 0


class TaskProgress(Record):
    """`epoch`, `timeline` (in all reports): the task's, so that a late one is known as stale."""

    trainer: str
    attempt: int
    minibatches: int
    epoch: int | None = None
    timeline: int | None = None


class TakeNext(Record):
    """With the end of a task the next one of the shared stream: one request, one transaction. As in AcquireTask, the same
    `request` gets the same pending task again, whether it comes this way or through acquireTask."""

    request: str
    generation: int


class CompleteTask(Record):
    """`sums`: an EVALUATE task's, or what the user's `metrics(sums)` made of all of them (EXPORT); `exports`: files by kind.

    Asynchronous: `generation` in which its first push was made, `skipped` minibatches by pserver that was out of reach.
    `next`: take another task with it."""

    trainer: str
    attempt: int
    records: int = 0
    sums: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    epoch: int | None = None
    timeline: int | None = None
    generation: int | None = None
    skipped: dict[str, int] = Field(default_factory=dict)
    next: TakeNext | None = None


class Completed(Record):
    """`next`: the task that was taken with it; null if none was asked for, or there is none at once: then acquireTask
    (with the same `request`) says why."""

    next: Task | None = None


class FailTask(Record):
    trainer: str
    attempt: int
    failure: UserFailure
    epoch: int | None = None
    timeline: int | None = None


class HeldTask(Record):
    """An attempt under way and the minibatches done of it: more than before is a sign of life."""

    task_id: str
    attempt: int
    epoch: int
    minibatches: int


class TrainerProgress(Record):
    """`loss_sum` (of loss x records) and `records`: of `epoch`, this trainer's share; `step`: the last one reported."""

    trainer: str
    tasks: tuple[HeldTask, ...] = ()
    epoch: int = 0
    step: int | None = None
    loss_sum: float = 0.0
    records: int = 0


class StepMetrics(Record):
    """One trainer's share of a step (sync) or of some minibatches (async): sum of loss x records."""

    step: int
    epoch: int
    loss_sum: float
    records: int


class MetricBatch(Record):
    trainer: str
    steps: tuple[StepMetrics, ...]
