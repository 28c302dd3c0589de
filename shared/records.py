"""The records that cross REST and etcd: JSON on both, validated on entry, frozen."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.datasets import Dataset


class Record(BaseModel):
    """Unknown fields are ignored: a newer peer may send more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()


# ---------------------------------------------------------------- job


class Mode(StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class JobSpec(Record):
    """What the user asked for; written once. Durations in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    script: str
    dataset: Dataset
    evaluation_dataset: Dataset | None = None
    mode: Mode = Mode.SYNC
    epochs: int = Field(default=1, ge=1)
    global_batch_size: int = Field(default=256, ge=1)
    lanes: int = Field(default=8, ge=1, le=1024)
    seed: int = Field(default=0, ge=0, lt=2**63)
    trainers: int = Field(default=2, ge=1)
    pservers: int = Field(default=1, ge=1, le=128)
    records_per_task: int | None = Field(default=None, ge=1)
    block_bytes: int = Field(default=1 << 20, ge=256, le=64 << 20)
    slot_count: int = Field(default=1024, ge=128, le=1024)
    push_every: int = Field(default=1, ge=1)
    pull_every: int = Field(default=1, ge=1)
    clip_norm: float | None = Field(default=None, gt=0)
    threads_per_trainer: int = Field(default=1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    shuffle: bool = True
    storage: str
    lease_ttl_s: float = Field(default=5.0, ge=2.0)
    task_timeout_floor_s: float = Field(default=30.0, gt=0)
    task_timeout_ceiling_s: float = Field(default=1200.0, gt=0)
    max_task_failures: int = Field(default=3, ge=1)
    max_discarded_fraction: float = Field(default=0.01, ge=0, le=1)
    max_user_failures: int = Field(default=3, ge=1)
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    checkpoint_every_epochs: int | None = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1, le=100)

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.lanes & (self.lanes - 1):
            below = 1 << (self.lanes.bit_length() - 1)
            msg = f"lanes must be a power of two, got {self.lanes}; use {below} or {below * 2}"
            raise ValueError(msg)
        if self.mode is Mode.SYNC and self.global_batch_size < self.lanes:
            msg = f"global_batch_size {self.global_batch_size} is less than lanes {self.lanes}: every lane needs a record; lower lanes"
            raise ValueError(msg)
        if self.mode is Mode.SYNC and self.global_batch_size % self.lanes:
            msg = f"global_batch_size {self.global_batch_size} is not a multiple of lanes {self.lanes}: lanes take equal shares"
            raise ValueError(msg)
        if self.block_bytes % 64:
            msg = f"block_bytes must be a multiple of 64, got {self.block_bytes}"
            raise ValueError(msg)
        return self

    @property
    def minibatch_size(self) -> int:
        """Records of one forward/backward: a lane's share of a step (sync), the whole batch (async)."""
        return self.global_batch_size // self.lanes if self.mode is Mode.SYNC else self.global_batch_size

    @property
    def streams(self) -> int:
        return self.lanes if self.mode is Mode.SYNC else 1

    @property
    def task_records(self) -> int:
        """Records per task: as given, else 16 minibatches."""
        return self.records_per_task or 16 * self.minibatch_size


class Phase(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    CHECKPOINTING = "CHECKPOINTING"
    RESIZING = "RESIZING"
    ROLLING_BACK = "ROLLING_BACK"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        return self in {Phase.COMPLETED, Phase.FAILED}


class Stage(StrEnum):
    """What a RUNNING job is at: TRAIN -> EVALUATE (if there is an evaluation dataset) -> EXPORT -> DONE."""

    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    EXPORT = "EXPORT"
    DONE = "DONE"


class UserFailure(Record):
    """An exception of the user's module. `task`: where it happened, for people (`task 7 (file.parquet rows 0-511)`)."""

    error_type: str
    message: str
    traceback: str = ""
    task: str = ""
    trainer: str = ""


class JobResult(Record):
    """Filled as a job ends: metrics of the evaluation, paths of the exported model, counts."""

    metrics: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    discarded_tasks: int = 0
    discarded_records: int = 0
    trained_records: int = 0


class JobState(Record):
    """`trainers`: of this generation, in order of arrival. `timeline`: generation of the last roll-back (versions repeat
    after one: whoever holds parameters of another timeline forgets them). `checkpoint`: uuid of where it starts from.
    Both change only together; `slots` too is written only in the transaction that begins a timeline."""

    phase: Phase = Phase.WAITING
    stage: Stage = Stage.TRAIN
    generation: int = 0
    reason: str = ""
    failure: UserFailure | None = None
    result: JobResult = Field(default_factory=JobResult)
    trainers: tuple[str, ...] = ()
    timeline: int = 0
    checkpoint: str = ""


# ---------------------------------------------------------------- members


class MasterLock(Record):
    """`lease` lets a peer that proved this process dead revoke it."""

    master: str
    url: str
    lease: int = 0


class MasterAddress(Record):
    url: str
    term: int


class Restored(Record):
    """What a pserver did about a roll-back: it serves `checkpoint` in `timeline`, or cannot (`error` says why)."""

    timeline: int
    checkpoint: str
    error: str = ""


class PserverMember(Record):
    """`uds`: path of the UNIX socket beside `url`, empty if none. `lease`: see MasterLock. `restored`: its answer to the
    last roll-back it took part in. One that never did holds parameters only if its key is older than `layout`."""

    index: int
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    uds: str = ""
    restored: Restored | None = None


class TrainerMember(Record):
    """`url` answers /healthz: the probe that tells a dead trainer from a slow one."""

    trainer: str
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0


class LaneInterval(Record):
    trainer: str
    first: int
    last: int  # exclusive


class LaneMap(Record):
    """Who computes which lanes in this generation; intervals are disjoint and cover [0, lanes)."""

    generation: int
    lanes: int
    intervals: tuple[LaneInterval, ...] = ()

    def of(self, trainer: str) -> tuple[int, int]:
        """[first, last) of a trainer; (0, 0) for a hot spare."""
        for interval in self.intervals:
            if interval.trainer == trainer:
                return interval.first, interval.last
        return 0, 0


class SlotMap(Record):
    """`owners[slot]` is a pserver index."""

    version: int
    owners: tuple[int, ...]


# ---------------------------------------------------------------- tasks


class TaskKind(StrEnum):
    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    PREDICT = "PREDICT"
    EXPORT = "EXPORT"


class TaskMeta(Record):
    """`digest`: of the file table; `tasks`: tasks of one epoch."""

    epoch: int
    digest: str
    seed: int
    tasks: int
    evaluation_tasks: int = 0
    evaluation_digest: str = ""


class PendingTask(Record):
    """`remaining_s`: deadline as remaining seconds at the time of writing. `request`: the idempotency key that got it."""

    attempt: int
    trainer: str
    stream: str
    epoch: int
    index: int
    remaining_s: float
    failures: int = 0
    request: str = ""


class RequeuedTask(Record):
    attempts: int
    failures: int
    cause: str
    stream: str
    epoch: int
    index: int


class DiscardedTask(Record):
    attempts: int
    failures: int
    cause: str
    epoch: int
    stream: str
    index: int


class EvaluationSums(Record):
    """Sums over the evaluation tasks finished so far; written in the txn that finishes the task, so never twice."""

    sums: dict[str, float] = Field(default_factory=dict)
    finished: int = 0


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


class CompleteTask(Record):
    """`sums`: an EVALUATE task's, or what the user's `metrics(sums)` made of all of them (EXPORT); `exports`: files by kind."""

    trainer: str
    attempt: int
    records: int = 0
    sums: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    epoch: int | None = None
    timeline: int | None = None


class FailTask(Record):
    trainer: str
    attempt: int
    failure: UserFailure
    epoch: int | None = None
    timeline: int | None = None


class TaskSummary(Record):
    """Counts of the current epoch (`stage` says which queue)."""

    epoch: int
    epochs: int
    stage: Stage
    total: int
    todo: int
    pending: int
    done: int
    discarded: int
    records_total: int
    records_done: int


# ---------------------------------------------------------------- metrics


class StepMetrics(Record):
    """One trainer's share of a step (sync) or of some minibatches (async): sum of loss x records."""

    step: int
    epoch: int
    loss_sum: float
    records: int


class MetricBatch(Record):
    trainer: str
    steps: tuple[StepMetrics, ...]
