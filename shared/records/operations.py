"""Long-running requests: the Operation resource of REST, kept in etcd so that it outlives its master.

RUNNING --> DONE | FAILED          `reason` says what it waits for, or how it ended
"""

from __future__ import annotations

from enum import StrEnum

from shared.records.job_spec import JobSpec, Mode
from shared.records.record import Record


class OperationKind(StrEnum):
    CREATE_CHECKPOINT = "CREATE_CHECKPOINT"
    RESTORE_CHECKPOINT = "RESTORE_CHECKPOINT"
    VERIFY_CHECKPOINT = "VERIFY_CHECKPOINT"


class OperationState(StrEnum):
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


class Operation(Record):
    """`checkpoint_id`, `step`: of the checkpoint (CREATE: once it is made). `cause`: who requested it, and why.

    `attempt`: how often the checkpoint was requested (CREATE). `timeline`: of the rollback it led to, 0 before (RESTORE).
    `after`: the operation whose end it waits for before its own checkpoint is requested (CREATE). `joined`: the operation that makes
    the checkpoint for this one, too (CREATE).
    `limit_s`: how long it may take; a new master starts this time again. `error_code`: of shared.errors, when FAILED.
    """

    operation_id: str
    kind: OperationKind
    state: OperationState = OperationState.RUNNING
    cause: str = ""
    reason: str = ""
    error_code: str = ""
    checkpoint_id: str = ""
    step: int | None = None
    attempt: int = 1
    timeline: int = 0
    after: str = ""
    joined: str = ""
    limit_s: float
    create_time: str = ""
    end_time: str = ""

    @property
    def running(self) -> bool:
        return self.state is OperationState.RUNNING


class CheckpointRequest(Record):
    """`job/checkpoint`: requests a checkpoint of a future version. The key is deleted once that checkpoint is the latest."""

    operation: str
    attempt: int


def saves_on_demand(spec: JobSpec) -> bool:
    """Whether checkpoints of the job can be requested and restored."""
    return spec.mode is Mode.SYNC or spec.checkpoint_kind == "coordinated"
