"""The records that cross REST and etcd: JSON on both, validated on entry, frozen. One name to import them
from.

The records of checkpoints, layout, steps, operations and trainers' progress are imported from their own
modules.
"""

from trireme_shared.protocol.records.assignments import SlotMap, TrainerList, TrainersChange
from trireme_shared.protocol.records.job import FailureCause, JobResult, JobState, Phase, Stage, TaskSummary
from trireme_shared.protocol.records.job_choices import Dispatch, Mode, Strategy
from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.records.members import (
    Exchange,
    Holding,
    MasterAddress,
    MasterLock,
    PserverMember,
    Restored,
    TrainerMember,
)
from trireme_shared.protocol.records.queue import (
    Attempt,
    DiscardedTask,
    EpochPlan,
    EvaluationSums,
    PendingTask,
    RequeuedTask,
    TaskMeta,
    ValidationSums,
)
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.tasks import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    MetricBatch,
    MetricsTaken,
    StepMetrics,
    StepTimes,
    TakeNext,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    UserFailure,
)

__all__ = [
    "AcquireTask",
    "Attempt",
    "CompleteTask",
    "Completed",
    "DiscardedTask",
    "Dispatch",
    "EpochPlan",
    "EvaluationSums",
    "Exchange",
    "FailTask",
    "FailureCause",
    "Holding",
    "JobResult",
    "JobSpec",
    "JobState",
    "MasterAddress",
    "MasterLock",
    "MetricBatch",
    "MetricsTaken",
    "Mode",
    "PendingTask",
    "Phase",
    "PserverMember",
    "Record",
    "RequeuedTask",
    "Restored",
    "SlotMap",
    "Stage",
    "StepMetrics",
    "StepTimes",
    "Strategy",
    "TakeNext",
    "Task",
    "TaskAnswer",
    "TaskKind",
    "TaskMeta",
    "TaskProgress",
    "TaskSummary",
    "TrainerList",
    "TrainerMember",
    "TrainersChange",
    "UserFailure",
    "ValidationSums",
]
