"""What takes long and was asked for: the Operation resource of REST, kept in etcd so that it outlives its master.

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
    """`checkpoint_id`, `step`: of the checkpoint it is about (of the one made, once it is). `cause`: who asked, and why.

    `attempt`: how often a checkpoint was asked for (CREATE). `timeline`: of the roll-back it led to, 0 before (RESTORE).
    `limit_s`: how long it may take; a new master grants it anew. `error_code`: of shared.errors, when FAILED.
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
    limit_s: float
    create_time: str = ""
    end_time: str = ""

    @property
    def running(self) -> bool:
        return self.state is OperationState.RUNNING


class CheckpointRequest(Record):
    """`job/checkpoint`: a checkpoint of a version that is not made yet, please. The key goes once one is the latest."""

    operation: str
    attempt: int


def saves_on_demand(spec: JobSpec) -> bool:
    """Whether the job can be asked for a checkpoint, or to go back to one."""
    return spec.mode is Mode.SYNC or spec.checkpoint_kind == "coordinated"
