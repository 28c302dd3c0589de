"""The job's spec: settings.py; what single settings may be: choices.py; which go together: combinations.py, strategy.py, idle.py."""

from trireme_shared.protocol.records.job_spec.choices import (
    INITIAL_FILES,
    JOB_NAME,
    MAX_MEMBERS,
    MAX_TASKS,
    RENAMED,
    SNAPSHOT_BYTES,
    TRAINING_FILE,
    Dispatch,
    EvaluateEvery,
    JobTask,
    Mode,
    Narrow,
    Nonfinite,
    Precision,
    RestartPolicy,
    StopEarly,
    Strategy,
    Transported,
)
from trireme_shared.protocol.records.job_spec.idle import without_effect
from trireme_shared.protocol.records.job_spec.settings import JobSettings, JobSpec

__all__ = [
    "INITIAL_FILES",
    "JOB_NAME",
    "MAX_MEMBERS",
    "MAX_TASKS",
    "RENAMED",
    "SNAPSHOT_BYTES",
    "TRAINING_FILE",
    "Dispatch",
    "EvaluateEvery",
    "JobSettings",
    "JobSpec",
    "JobTask",
    "Mode",
    "Narrow",
    "Nonfinite",
    "Precision",
    "RestartPolicy",
    "StopEarly",
    "Strategy",
    "Transported",
    "without_effect",
]
