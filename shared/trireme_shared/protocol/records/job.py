"""The job as a whole: its phase, its stage, its result."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from trireme_shared.protocol.records.pauses import Losses, Saving
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.tasks import BestEvaluation, UserFailure


class Phase(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    CHECKPOINTING = "CHECKPOINTING"
    ROLLING_BACK = "ROLLING_BACK"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        return self in {Phase.COMPLETED, Phase.FAILED}


class Stage(StrEnum):
    """What a RUNNING job does: TRAIN -> EVALUATE (if there is an evaluation dataset) -> EXPORT -> DONE."""

    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    EXPORT = "EXPORT"
    DONE = "DONE"


class FailureCause(StrEnum):
    """Why a job failed. SCRIPT: the user's code, or what it computes. DATASET: it cannot be read. STORAGE: checkpoints cannot be
    read, or the model cannot be written. MEMBERS: members did not come back in time."""

    SCRIPT = "SCRIPT"
    DATASET = "DATASET"
    STORAGE = "STORAGE"
    MEMBERS = "MEMBERS"


class JobResult(Record):
    """Filled at the end of a job: metrics of the evaluation, paths of the exported model, counts, lost updates."""

    metrics: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    discarded_tasks: int = Field(default=0, description="Number of tasks that were given up.")
    discarded_records: int = Field(default=0, description="Number of records of tasks that were given up.")
    trained_records: int = Field(default=0, description="Number of records that were trained, over all epochs.")
    losses: Losses = Field(default_factory=Losses)
    best: BestEvaluation | None = None
    stopped_step: int | None = Field(
        default=None,
        description="So many steps (asynchronous: minibatches) were done when stop_early ended training; null: it did not.",
    )
    stopped_epochs: int | None = Field(
        default=None, description="So many epochs were over then; null: training did not end early."
    )


class JobState(Record):
    """Who trains is in a TrainerList, written in the same transaction. `timeline`: generation of the last rollback; versions repeat after a
    rollback, so parameters of another timeline must be dropped. `checkpoint`: uuid of the checkpoint the timeline starts from.
    Both change only together; `slots` is written in the transaction that begins a timeline, and by a resize. `damaged`: checkpoints
    that could not be loaded. `failure`, `cause`: of a FAILED job.

    Asynchronous: `saving` while CHECKPOINTING; `saved`: number of checkpoints begun. `absent`: parameter servers that the job
    waits for. `mended`: generation in which the last absent one was back. `mends`: index -> incarnation of those that came back.

    `joined`: index -> incarnation of parameter servers that joined this timeline by a resize: they get their parameters from others."""

    phase: Phase = Phase.WAITING
    stage: Stage = Stage.TRAIN
    generation: int = 0
    reason: str = ""
    failure: UserFailure | None = None
    cause: FailureCause | None = None
    result: JobResult = Field(default_factory=JobResult)
    timeline: int = 0
    checkpoint: str = ""
    damaged: tuple[str, ...] = ()
    saving: Saving | None = None
    saved: int = 0
    absent: tuple[int, ...] = ()
    mended: int = 0
    mends: dict[str, str] = Field(default_factory=dict)
    joined: dict[str, str] = Field(default_factory=dict)


class TaskSummary(Record):
    """Counts of the current epoch (`stage` says which queue), and what an epoch of training is made of."""

    epoch: int
    epochs: int
    stage: Stage
    total: int
    todo: int = Field(description="Number of tasks that nobody has started.")
    pending: int = Field(description="Number of tasks that trainers work on.")
    done: int = Field(description="Number of tasks that are done.")
    discarded: int = Field(description="Number of tasks that were given up.")
    records_total: int
    records_done: int
    task_records: int = Field(
        default=0, description="Number of records in a task of training; the last one of a file may have fewer."
    )
    steps_per_epoch: int | None = Field(
        default=None, description="Steps of an epoch of training (asynchronous: pushes); null: not known."
    )
    total_steps: int | None = Field(default=None, description="Steps of all epochs; discarded tasks make fewer.")
    records_left_out: int = Field(default=0, description="Number of records in each epoch that `drop_last` leaves out.")
