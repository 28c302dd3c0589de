"""The task queues as etcd holds them: what is in flight, never the dataset."""

from __future__ import annotations

import hashlib

from pydantic import Field

from shared.records.record import Record


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


class FailureCounts(Record):
    """What the users' errors have cost the job so far. `seen`: digest of an error -> how often, of the first few errors."""

    total: int = 0
    seen: dict[str, int] = Field(default_factory=dict)


def error_digest(error_type: str, message: str) -> str:
    """Names an error in few bytes, however long its message."""
    return hashlib.sha256(f"{error_type}\0{message}".encode()).hexdigest()[:16]
