"""The task queues in etcd: pending and requeued tasks, never the dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

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


class Attempt(Record):
    """One trainer that works on a task. `request`: the idempotency key that acquired it."""

    attempt: int
    trainer: str
    request: str = ""


class PendingTask(Record):
    """`remaining_s`: seconds to the deadline at the time of writing. `request`: the idempotency key that acquired the task.
    `others`: earlier attempts that may still finish it, because it was late and was given twice."""

    attempt: int
    trainer: str
    stream: str
    epoch: int
    index: int
    remaining_s: float
    failures: int = 0
    request: str = ""
    others: tuple[Attempt, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Who may report about it, the newest first."""
        return Attempt(attempt=self.attempt, trainer=self.trainer, request=self.request), *self.others

    def is_at(self, trainer: str) -> bool:
        return any(each.trainer == trainer for each in self.attempts)

    def find(self, attempt: int, trainer: str) -> Attempt | None:
        """The attempt of that number, if it is that trainer's and may still report."""
        return next((each for each in self.attempts if (each.attempt, each.trainer) == (attempt, trainer)), None)

    def without(self, lost: Collection[str]) -> PendingTask | None:
        """Without the earlier attempts of these trainers; None if the newest is theirs: whatever came before it may have given up."""
        if self.trainer in lost:
            return None
        return self.model_copy(update={"others": tuple(each for each in self.others if each.trainer not in lost)})


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
    """Sums over the finished evaluation tasks; written in the transaction that finishes a task, so each counts once."""

    sums: dict[str, float] = Field(default_factory=dict)
    finished: int = 0


class FailureCounts(Record):
    """Failures of the user's code so far. `seen`: digest of an error -> how often, for the first few errors."""

    total: int = 0
    seen: dict[str, int] = Field(default_factory=dict)


def error_digest(error_type: str, message: str) -> str:
    """A short name for an error, however long its message."""
    return hashlib.sha256(f"{error_type}\0{message}".encode()).hexdigest()[:16]
