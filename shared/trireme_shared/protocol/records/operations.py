"""Long-running requests: the Operation resource of REST, kept in etcd so that it outlives its master: by the
job itself, or by its cluster (pause, resume, cancel, delete), whose operations outlive the job, too.

RUNNING --> DONE | FAILED          `reason` says what it waits for, or how it ended

A resize: PLANNED --members wanted--> STARTING --all registered--> MIGRATING --group by group--> COMMITTED
                                        ^------- a member died -------' |
                                                                        `--> ROLLED_BACK | CANCELLED | FAILED
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from trireme_shared.protocol.records.job_choices import Mode
from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.records.record import Record


class OperationKind(StrEnum):
    """What it does."""

    CREATE_CHECKPOINT = "CREATE_CHECKPOINT"
    RESTORE_CHECKPOINT = "RESTORE_CHECKPOINT"
    VERIFY_CHECKPOINT = "VERIFY_CHECKPOINT"
    RESIZE = "RESIZE"
    PAUSE = "PAUSE"
    RESUME = "RESUME"
    CANCEL = "CANCEL"
    DELETE = "DELETE"


class OperationState(StrEnum):
    """How far it is."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


class ResizePhase(StrEnum):
    """ROLLED_BACK and CANCELLED: groups that had moved stay where they are. FAILED: nothing has moved."""

    PLANNED = "PLANNED"
    STARTING = "STARTING"
    MIGRATING = "MIGRATING"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class Strategy(StrEnum):
    """LIVE: slots move while the job trains. RESTART: a checkpoint, then all parameter servers load it by the
    new slot map."""

    LIVE = "live"
    RESTART = "restart"


class Resize(Record):
    """Other numbers of members. `groups`, `bytes` and `slots` are those of the whole resize as it was planned
    last, with what had moved before."""

    trainers: int
    pservers: int
    before_trainers: int
    before_pservers: int
    trainers_asked: bool = Field(
        default=False,
        description="The resize asked for a number of trainers, perhaps the same one as before: a cluster "
        "had given the job as many as it could use.",
    )
    strategy: Strategy = Strategy.LIVE
    phase: ResizePhase = Field(default=ResizePhase.PLANNED, description="How far the resize is.")
    attempt: int = Field(
        default=0,
        description="How often the migration was planned: again after a member of it died, or the job went "
        "back to a checkpoint.",
    )
    groups: int = 0
    groups_moved: int = Field(default=0, description="Number of groups that have moved.")
    slots: int = 0
    bytes: int = 0
    bytes_moved: int = Field(default=0, description="Bytes that were sent so far.")
    bytes_before: int = Field(
        default=0, description="Those of bytes_moved that attempts sent which did not end."
    )
    longest_pause_s: float = Field(
        default=0.0, description="How many seconds the pushes of a group had to wait at most."
    )
    saving: str = Field(
        default="", description="Id of the operation that makes the checkpoint for it; empty: none."
    )


class MovedBytes(Record):
    """Of one parameter server in a prediction."""

    pserver: int = Field(description="Index of the parameter server.")
    sent: int = Field(default=0, description="Bytes that it sends.")
    received: int = Field(default=0, description="Bytes that it receives.")


class ResizePrediction(Record):
    """A dry run, from the layout alone. `slots`: how many move. `bytes`: payloads that they send."""

    trainers: int
    pservers: int
    before_trainers: int
    before_pservers: int
    slots: int = 0
    groups: int = 0
    bytes: int = 0
    by_pserver: tuple[MovedBytes, ...] = Field(
        default=(), description="What each parameter server sends and receives."
    )


class Operation(Record):
    """What takes longer than a request: a checkpoint, a restore, a verification, a resize; in a cluster also
    to pause, resume, cancel or delete a job. A new master begins `limit_s` again."""

    operation_id: str = Field(description="Id of the operation.")
    kind: OperationKind
    state: OperationState = Field(default=OperationState.RUNNING, description="RUNNING, DONE or FAILED.")
    cause: str = ""
    reason: str = ""
    error_code: str = ""
    checkpoint_id: str = ""
    step: int | None = None
    attempt: int = Field(default=1, description="How often the checkpoint was requested.")
    timeline: int = 0
    after: str = Field(
        default="",
        description="Id of the operation whose end this one waits for before its own checkpoint is "
        "requested; empty: none.",
    )
    joined: str = Field(
        default="", description="Id of the operation whose checkpoint this one shares; empty: none."
    )
    resize: Resize | None = Field(
        default=None, description="Numbers and progress of a resize; null: it is none."
    )
    limit_s: float = Field(
        description="It fails if it has not ended after so many seconds; 0: it has no limit."
    )
    create_time: str = ""
    end_time: str = ""

    @property
    def running(self) -> bool:
        return self.state is OperationState.RUNNING


class KeptAnswer(Record):
    """`key`: a digest of the Idempotency-Key. `asked`: a digest of what was asked for. `operation`: the
    operationId. `answer`: the body, as JSON; empty while the request is carried out and its effect is not in
    etcd yet. `create_time`: when it came first."""

    key: str
    asked: str
    operation: str
    answer: str = ""
    create_time: str


class CheckpointRequest(Record):
    """`job/checkpoint`: requests a checkpoint of a future version. The key is deleted once that checkpoint is
    the latest."""

    operation: str
    attempt: int


def saves_on_demand(spec: JobSpec) -> bool:
    """Whether checkpoints of the job can be requested and restored."""
    return spec.mode is Mode.SYNC or spec.checkpoint_kind == "coordinated"
