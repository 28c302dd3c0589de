"""The job as a whole: its phase, its stage, its result; paused checkpoints of an asynchronous job, and the
updates that it has lost.

trainers/pause, job/state: saving --every trainer has paused--> cut
    --every pserver has copied--> confirmed, pause gone
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from trireme_shared.protocol.records.record import Message, Record
from trireme_shared.protocol.records.tasks import BestEvaluation, UserFailure


class Saving(Record):
    """In the job's state: checkpoint `uuid` (number `step` of the job) is being made. `cut`: all trainers
    have paused, copy now. `operation`: the one that requested it, or was running. `left_out`: trainers that
    did not pause in time; they are no members until the pause is over. `evaluation`, `minibatches`: see
    CheckpointCut."""

    uuid: str
    step: int
    cut: bool = False
    operation: str = ""
    left_out: tuple[str, ...] = ()
    evaluation: int = 0
    minibatches: int = 0


class Pause(Record):
    """`trainers/pause`: stop after a minibatch; continue when the key is gone. The master's lease holds it,
    so the master's death ends the pause too."""

    uuid: str
    generation: int
    reason: str


class Paused(Record):
    """In `trainers/<id>`: the trainer has paused, all its pushes are acknowledged, and its reader stands
    here.

    `minibatch`: the next one of the task. `offset`: its first record, counted from the start of `file`.
    Without a task there is no file.
    """

    uuid: str
    epoch: int = 0
    task_id: str = ""
    attempt: int = 0
    minibatch: int = 0
    file: str = ""
    offset: int = 0


class Losses(Record):
    """`tasks/losses`: for each parameter server (its index as text) the minibatches of closed tasks that its
    blocks never got. `lost`: its process came back from an older checkpoint. `skipped`: it could not be
    reached."""

    lost: dict[str, int] = Field(
        default_factory=dict,
        description="By index of a parameter server: minibatches lost because it came back from an older "
        "checkpoint.",
    )
    skipped: dict[str, int] = Field(
        default_factory=dict,
        description="By index of a parameter server: minibatches left out because it could not be reached.",
    )

    def with_lost(self, index: int, lost: int, skipped: int) -> Losses:
        """With new counts for pserver `index` in place of the old ones."""
        return Losses(lost=_set(self.lost, index, lost), skipped=_set(self.skipped, index, skipped))

    def with_skipped(self, skipped: dict[str, int]) -> Losses:
        """With these skipped minibatches added."""
        grown = self
        for index, count in skipped.items():
            grown = Losses(
                lost=grown.lost, skipped=_set(grown.skipped, index, grown.skipped.get(index, 0) + count)
            )
        return grown


def _set(counts: dict[str, int], index: int | str, count: int) -> dict[str, int]:
    """Counts of zero are left out."""
    rest = {key: value for key, value in counts.items() if key != str(index)}
    return dict(sorted((rest | {str(index): count}).items())) if count else rest


class Torn(Record):
    """A step of `timeline` mixes data of a discarded task with data that replaced it. The job goes back to a
    checkpoint."""

    timeline: int
    cause: Message


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
    """Why a job failed. SCRIPT: the user's code, or what it computes. DATASET: it cannot be read. STORAGE:
    checkpoints cannot be read, or the model cannot be written. MEMBERS: members did not come back in time."""

    SCRIPT = "SCRIPT"
    DATASET = "DATASET"
    STORAGE = "STORAGE"
    MEMBERS = "MEMBERS"


class JobResult(Record):
    """Filled at the end of a job: metrics of the evaluation, paths of the exported model, counts, lost
    updates."""

    metrics: dict[str, float] = Field(default_factory=dict)
    exports: dict[str, str] = Field(default_factory=dict)
    discarded_tasks: int = Field(default=0, description="Number of tasks that were given up.")
    discarded_records: int = Field(default=0, description="Number of records of tasks that were given up.")
    trained_records: int = Field(
        default=0, description="Number of records that were trained, over all epochs."
    )
    losses: Losses = Field(default_factory=Losses)
    best: BestEvaluation | None = None
    stopped_step: int | None = Field(
        default=None,
        description="So many steps (asynchronous: minibatches) were done when stop_early ended training; "
        "null: it did not.",
    )
    stopped_epochs: int | None = Field(
        default=None, description="So many epochs were over then; null: training did not end early."
    )


class JobState(Record):
    """Who trains is in a TrainerList, written in the same transaction. `timeline`: generation of the last
    rollback; versions repeat after a rollback, so parameters of another timeline must be dropped.
    `checkpoint`: uuid of the checkpoint the timeline starts from. Both change only together; `slots` is
    written in the transaction that begins a timeline, and by a resize. `damaged`: checkpoints that could not
    be loaded. `failure`, `cause`: of a FAILED job.

    Asynchronous: `saving` while CHECKPOINTING; `saved`: number of checkpoints begun. `absent`: parameter
    servers that the job waits for. `mended`: generation in which the last absent one was back. `mends`: index
    -> incarnation of those that came back.

    `joined`: index -> incarnation of parameter servers that joined this timeline by a resize: they get their
    parameters from others."""

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
        default=0,
        description="Number of records in a task of training; the last one of a file may have fewer.",
    )
    steps_per_epoch: int | None = Field(
        default=None, description="Steps of an epoch of training (asynchronous: pushes); null: not known."
    )
    total_steps: int | None = Field(
        default=None, description="Steps of all epochs; discarded tasks make fewer."
    )
    records_left_out: int = Field(
        default=0, description="Number of records in each epoch that `drop_last` leaves out."
    )
