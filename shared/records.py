"""The records that cross REST and etcd: JSON on both, validated on entry, frozen."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shared.job_spec import Dispatch, JobSpec, Mode
from shared.metrics import MetricBatch, StepMetrics
from shared.queue_records import DiscardedTask, EvaluationSums, PendingTask, RequeuedTask, TaskMeta
from shared.record import Record
from shared.saving import Losses, Paused, Saving, Torn
from shared.task_records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    TakeNext,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    UserFailure,
)

__all__ = [  # of other files, under the one name that everybody imports from
    "AcquireTask",
    "CompleteTask",
    "Completed",
    "DiscardedTask",
    "Dispatch",
    "EvaluationSums",
    "FailTask",
    "JobSpec",
    "MetricBatch",
    "Mode",
    "PendingTask",
    "Record",
    "RequeuedTask",
    "StepMetrics",
    "TakeNext",
    "Task",
    "TaskAnswer",
    "TaskKind",
    "TaskMeta",
    "TaskProgress",
    "UserFailure",
]


# ---------------------------------------------------------------- job


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


class JobResult(Record):
    """Filled as a job ends: metrics of the evaluation, paths of the exported model, counts, what was lost."""

    metrics: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    discarded_tasks: int = 0
    discarded_records: int = 0
    trained_records: int = 0
    losses: Losses = Field(default_factory=Losses)


class JobState(Record):
    """`trainers`: of this generation, in order of arrival. `timeline`: generation of the last roll-back (versions repeat
    after one: whoever holds parameters of another timeline forgets them). `checkpoint`: uuid of where it starts from. Both
    change only together; `slots` too is written only in the transaction that begins a timeline. `damaged`: checkpoints
    that could not be loaded.

    Asynchronous: `saving` while CHECKPOINTING, `saved` counts those begun. `absent`: parameter servers that are waited
    for; `mended`: generation in which the last one was back; `mends`: index -> incarnation of those that came back."""

    phase: Phase = Phase.WAITING
    stage: Stage = Stage.TRAIN
    generation: int = 0
    reason: str = ""
    failure: UserFailure | None = None
    result: JobResult = Field(default_factory=JobResult)
    trainers: tuple[str, ...] = ()
    timeline: int = 0
    checkpoint: str = ""
    damaged: tuple[str, ...] = ()
    saving: Saving | None = None
    saved: int = 0
    absent: tuple[int, ...] = ()
    mended: int = 0
    mends: dict[str, str] = Field(default_factory=dict)


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
    """What a pserver did about a roll-back: it serves `checkpoint` in `timeline`, or cannot (`error` says why).

    `superseded`: it is not kept any more, since a newer one became the latest before the roll-back began: no damage.
    `rejoined`: it came back alone, the others went on; `positions`: of the tasks that were open at that checkpoint the
    minibatches that all its `blocks` have (-1: all); `damaged`: what is wrong with newer checkpoints."""

    timeline: int
    checkpoint: str
    error: str = ""
    superseded: bool = False
    rejoined: bool = False
    positions: dict[str, int] = Field(default_factory=dict)
    blocks: int = 0
    damaged: str = ""


class PserverMember(Record):
    """`uds`: path of the UNIX socket beside `url`, empty if none. `lease`: see MasterLock. `restored`: its answer to the
    last roll-back it took part in. One that never did holds parameters only if its key is older than `layout`. `copied`:
    the last paused checkpoint it has copied. `draining`: asked to leave, it would like a checkpoint of this version or later
    first. `trouble`, `waits`: why it cannot write, or load, checkpoints now. `torn`: why its parameters are of no use."""

    index: int
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    uds: str = ""
    restored: Restored | None = None
    copied: str = ""
    draining: int | None = None
    trouble: str = ""
    waits: str = ""
    torn: Torn | None = None


class TrainerMember(Record):
    """`url` answers /healthz: the probe that tells a dead trainer from a slow one. `paused`: see Paused."""

    trainer: str
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    paused: Paused | None = None


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
