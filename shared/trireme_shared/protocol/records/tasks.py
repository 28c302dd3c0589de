"""Messages between trainers and the dispatcher (a master, or the trainers themselves): requests for tasks,
answers, reports; and what a trainer is at work on, as it stands in the file that outlives it
(trireme_shared.platform.runtime.begun).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field

from trireme_shared.protocol.metrics import MOST_NAMES, NAME
from trireme_shared.protocol.records.metric_states import MetricState, Sum
from trireme_shared.protocol.records.record import Id, Int64, Message, Name, Record, Traceback
from trireme_shared.protocol.records.step import LanePosition

WAITS_FOR_CHARACTERS = 300
LISTED_CHARACTERS = 200  # of an exception's message in a list of jobs
MOST_WARNINGS = 8  # of a report


class UserFailure(Record):
    """An exception of the user's module. Texts that are too long are cut, and say so."""

    error_type: Name = Field(description="Class of the exception.")
    message: Message = Field(description="Text of the exception; a long one is cut.")
    traceback: Traceback = Field(default="", description="Traceback of the exception; a long one is cut.")
    task: Message = Field(
        default="", description="Where it happened, as text: `task 7 (file.parquet rows 0-511)`."
    )
    trainer: Name = ""
    fatal: bool = Field(
        default=False, description="It ends the job at once, whatever failures the job may still have."
    )

    def in_list(self) -> UserFailure:
        """As lists of jobs have it: without the traceback, and with the beginning of the message."""
        whole = len(self.message) <= LISTED_CHARACTERS
        message = self.message if whole else f"{self.message[:LISTED_CHARACTERS]} …"
        return self.with_fields(message=message, traceback="")


class TaskKind(StrEnum):
    """What is done with the records. EVALUATE: sums with the final parameters. EXPORT has no records: the
    model is written.

    While the job trains: VALIDATE: sums with the parameters of a checkpoint. METRICS has no records: the
    script's `metrics(sums)`."""

    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    EXPORT = "EXPORT"
    VALIDATE = "VALIDATE"
    METRICS = "METRICS"


class Task(Record):
    """One shard of work. `task_id`: "17" (TRAIN), "evaluate-3", "export-0", "validate-3", "metrics-0".
    `epoch`: of VALIDATE and METRICS, the number of the evaluation.

    `timeline`: the job's when the task was dispatched; reports carry it back. `index`: position in `stream`
    (of `stream_length` tasks) in this epoch. `offset`: the byte at which record `first` starts, if the format
    has lines.
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
    stamp: str = Field(
        default="",
        description="What the file was when its records were counted: its size, and a digest of its content "
        "or its ETag; empty: that is not known.",
    )
    timeline: int = 0
    alone: bool = Field(
        default=False,
        description="A process has died at this task: its records are to be read while the trainer computes "
        "nothing, so that it is known at "
        "what it dies if it dies again.",
    )


class AcquireTask(Record):
    """`stream`: a lane (sync training), or None for any task that is due. In sync mode `epoch` and `index`
    name the wanted task of the lane; the request also states that every earlier task of that lane is
    committed, and that *all* lanes have committed the epochs before `epoch`. `look`: only tell which task
    that is, if the lane's owner has it now (else `wait`); the lane may be another trainer's, nothing is
    stated and nothing changes. `wait_s`: if there is no task now, the answer may come so much later.
    `beside`: a task of the evaluation that runs while the job trains; `epoch` (0: none) is the number of the
    evaluation that the trainer waits for. `stopped`: the positions of all lanes at the version `index`, at
    which training ends early."""

    trainer: Id
    request: Id
    generation: Int64
    stream: Int64 | None = Field(
        default=None, description="The lane whose task is wanted; null: any task that is due."
    )
    epoch: Int64 = 0
    index: Int64 = 0
    look: bool = Field(default=False, description="Only tell which task it is; nothing changes.")
    beside: bool = Field(
        default=False,
        description="A task of the evaluation while the job trains; `epoch`: number of the evaluation that "
        "the trainer waits for, 0: none.",
    )
    stopped: tuple[LanePosition, ...] = Field(
        default=(),
        max_length=1024,
        description="Positions of all lanes at the version `index`, at which training ends early; empty: it "
        "does not.",
    )
    wait_s: float = Field(
        default=0.0,
        ge=0,
        le=30,
        description="If there is no task now, the answer may come so many seconds later.",
    )


class TaskAnswer(Record):
    """`task`: a task. `wait`: no task now, ask again after `retry_after_s`. `skip`: that task is discarded,
    ask for the next index. `exhausted`: the lane has no task at that index in this epoch. `end`: training
    (stream given) or the whole job (stream None) is over."""

    answer: Literal["task", "wait", "skip", "exhausted", "end"] = Field(
        description="task: a task. wait: none now, ask again. skip: that task is discarded. exhausted: the "
        "lane has no such task. end: all done."
    )
    reason: str = ""
    retry_after_s: float = Field(default=0.0, description="Ask again after so many seconds.")
    task: Task | None = Field(default=None, description="The task; null: none.")
    following: Task | None = Field(
        default=None,
        description="The lane's task behind `task`, which nobody is given by this answer (`attempt` 0): its "
        "records may be read while `task` is computed; null: there is none.",
    )
    stream_length: int = 0


class TaskProgress(Record):
    """`epoch`, `timeline` (in all reports): those of the task, so that a late report is recognised as stale.
    `waits_for`: before the next minibatch. A task is not late while one of `minibatches` and `work` grows."""

    trainer: str
    attempt: Int64
    minibatches: Int64
    work: Int64 = Field(
        default=0,
        description="What else the trainer has done for the task, in any unit: blocks of a checkpoint that "
        "are loaded, milliseconds of an export.",
    )
    epoch: Int64 | None = None
    timeline: Int64 | None = None
    waits_for: str = Field(
        default="",
        max_length=WAITS_FOR_CHARACTERS,
        description="What the trainer waits for before its next minibatch; empty: for nothing.",
    )


class TakeNext(Record):
    """Take the next task of the shared stream together with the end of a task: one request, one transaction.
    As in AcquireTask, a repeated `request` gets the same pending task, here and in acquireTask."""

    request: Id
    generation: Int64


Skipped = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,3}$")], Annotated[int, Field(ge=0, le=1 << 40)]],
    Field(max_length=128),
]
"""By index of a parameter server; as many as a job may have."""


class BestEvaluation(Record):
    """The evaluation with the best value of keep_best's metric so far. `checkpoint`: uuid of its
    parameters."""

    number: int
    step: int
    checkpoint: str
    metric: str = Field(description="Name of the metric of keep_best.")
    value: float = Field(description="Value of the metric of keep_best.")


class CompleteTask(Record):
    """`sums`: of an EVALUATE task, or the result of the user's `metrics(sums)` (EXPORT). `exports`: files by
    kind.

    Asynchronous: `generation` in which the task's first push was made; `skipped`: minibatches for each
    unreachable pserver. `next`: also take another task. `best`: of an EXPORT task, the evaluation whose
    parameters were exported as the best ones."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    trainer: str
    attempt: Int64
    records: Int64 = 0
    sums: dict[str, Sum] = Field(
        default_factory=dict,
        description="Sums of the evaluation by name, and states of metric objects; of an export and of "
        "METRICS the metrics, numbers only.",
    )
    exports: dict[str, str] = Field(default_factory=dict)
    epoch: Int64 | None = None
    timeline: Int64 | None = None
    generation: Int64 | None = None
    skipped: Skipped = Field(
        default_factory=dict,
        description="By index of a parameter server that could not be reached: minibatches it did not get.",
    )
    best: BestEvaluation | None = None
    next: TakeNext | None = Field(default=None, description="Also take another task; null: do not.")

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers in `sums`: those of an export and of METRICS."""
        return {name: value for name, value in self.sums.items() if not isinstance(value, MetricState)}


class Completed(Record):
    """`next`: the next task; null if none was requested or none is due now. acquireTask with the same
    `request` then says why."""

    next: Task | None = Field(default=None, description="Another task; null: none.")


class FailTask(Record):
    """The attempt has failed."""

    trainer: str
    attempt: Int64
    failure: UserFailure = Field(description="The exception of the user's code.")
    epoch: Int64 | None = None
    timeline: Int64 | None = None
    died_at: Int64 | None = Field(
        default=None,
        description="The trainer's process has died while it computed this minibatch of the task, or (-1) "
        "read its records; its successor "
        "reports that. `attempt` does not matter then. After some deaths at one place the task is discarded.",
    )


class HeldTask(Record):
    """A pending attempt, with what TaskProgress says of it."""

    task_id: str
    attempt: int
    epoch: int
    minibatches: int
    work: int = 0
    waits_for: str = ""


LaneSeconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class TrainerProgress(Record):
    """What a trainer of a masterless job writes about itself. `loss_sum` (of loss x records) and `records`:
    this trainer's share of `epoch`. `step`: the last one reported. `lane_s`, `least_lane_s`: as in
    MetricBatch."""

    trainer: str
    tasks: tuple[HeldTask, ...] = ()
    epoch: int = 0
    step: int | None = None
    loss_sum: float = 0.0
    records: int = 0
    lane_s: LaneSeconds | None = None
    least_lane_s: LaneSeconds | None = None


Finite = Annotated[float, Field(allow_inf_nan=False)]


class MetricValue(Record):
    """What a script has reported of one metric: the sum of the values, how many there were, the smallest and
    the largest."""

    total: Finite
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    least: Finite
    most: Finite


MetricValues = Annotated[dict[Annotated[str, Field(pattern=NAME)], MetricValue], Field(max_length=MOST_NAMES)]


class StepMetrics(Record):
    """One trainer's share of a step (sync) or of some minibatches (async): sum of loss x records. `skipped`:
    records left out because a loss or gradient was not finite. `timeline`: in which it was trained.
    `metrics`: what the script reported, by name. `lr`: learning rate of each group, `grad_norm`: of the whole
    gradient, if this trainer knows them (synchronous: the owner of lane 0)."""

    step: Int64
    epoch: Int64
    timeline: Int64 = 0
    loss_sum: float = Field(description="Sum of loss times records.")
    records: Int64
    skipped: Int64 = 0
    metrics: MetricValues = Field(default_factory=dict)
    lr: Annotated[tuple[Finite, ...], Field(max_length=MOST_NAMES)] = Field(
        default=(),
        description="Learning rate of each group of the optimizer in this step; empty: this trainer does not "
        "know them.",
    )
    grad_norm: Finite | None = Field(
        default=None, description="Norm of the step's whole gradient, before it is clipped; null: not known."
    )


Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class StepTimes(Record):
    """Where a trainer's time went since its report before: `seconds` of steps, the last of them `step`, of
    which it computed, waited for answers to its pushes, and for pulls. In synchronous mode a pull waits for
    the lanes of others, too."""

    step: Int64
    timeline: Int64 = 0
    seconds: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = Field(
        description="Seconds that its steps took together."
    )
    compute: Seconds = Field(description="Of them, seconds of forward and backward.")
    push: Seconds = Field(description="Of them, seconds in which it waited for answers to its pushes.")
    pull: Seconds = Field(description="Of them, seconds in which it waited for parameters.")


class MetricBatch(Record):
    """What a trainer reports of its steps."""

    trainer: str
    steps: tuple[StepMetrics, ...] = Field(description="The trainer's share of each step.")
    lane_s: LaneSeconds | None = Field(
        default=None,
        description="Seconds that a lane's minibatch takes at this trainer; null: not known, or the job is "
        "asynchronous.",
    )
    least_lane_s: LaneSeconds | None = Field(
        default=None,
        description="A lane's minibatch takes at least so many seconds, which is all that lanes without "
        "records tell; null: not known.",
    )
    times: StepTimes | None = Field(
        default=None,
        description="Where the time of its steps went since its report before; null: it ended none.",
    )
    whole: bool = Field(
        default=False,
        description="Synchronous: these are steps of all lanes, in order, told by the owner of lane 0.",
    )
    lost_before: Int64 | None = Field(
        default=None, description="The results of steps before this one are kept nowhere; null: none is lost."
    )
    store: bool = Field(default=False, description="The answer waits until the metrics are stored.")
    warnings: Annotated[
        tuple[Message, ...],
        Field(
            max_length=MOST_WARNINGS,
            description="Sentences for the user; they become events of the job, each once.",
        ),
    ] = ()


class MetricsTaken(Record):
    """What the master tells the owner of lane 0 about the metrics that it has."""

    next: Int64 | None = Field(
        default=None, description="The first step whose metrics are not known; null: that is not known yet."
    )
    stored: Int64 = Field(default=0, description="Metrics of steps before this one are stored.")
    kept: bool = Field(default=True, description="Whether the job has metrics by step at all.")


FILE_CHARACTERS = 80
READING = -1
"""As a number of a minibatch: the records of the whole task are being read."""


@dataclass(frozen=True, slots=True)
class BegunWork:
    """Minibatch `minibatch` of a task, or READING. `first`, `count`: the task's records in `file`."""

    task: str
    epoch: int
    minibatch: int
    file: str
    first: int
    count: int

    @classmethod
    def of(cls, task: Task, minibatch: int = READING) -> Self:
        return cls(task.task_id, task.epoch, minibatch, task.file, task.first, task.count)

    def to_bytes(self) -> bytes:
        """Less than 511 bytes: a long name of a file loses its beginning."""
        # once for each minibatch: what does not change within a task is kept
        return _task_bytes(self.task, self.epoch, self.file, self.first, self.count) % self.minibatch

    @classmethod
    def from_bytes(cls, text: bytes) -> Self | None:
        """None if that is no work."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        return found if isinstance(found.minibatch, int) and isinstance(found.task, str) else None

    def __str__(self) -> str:
        what = "read the records" if self.minibatch == READING else f"computed minibatch {self.minibatch}"
        return f"{what} of task {self.task} ({self.file} records {self.first}-{self.first + self.count - 1})"


@lru_cache(maxsize=64)
def _task_bytes(task: str, epoch: int, file: str, first: int, count: int) -> bytes:
    """With a place for the number of the minibatch."""
    short = file if len(file) <= FILE_CHARACTERS else f"…{file[-FILE_CHARACTERS:]}"
    known = {"task": task, "epoch": epoch, "file": short, "first": first, "count": count}
    text = json.dumps(known, ensure_ascii=False).replace("%", "%%")
    return f'{text[:-1]}, "minibatch": %d}}'.encode()
