"""The task queues in etcd: pending and requeued tasks, never the dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Self

from pydantic import ConfigDict, Field

from trireme_shared.protocol.errors import CallerError, TooLarge, UserCodeError
from trireme_shared.protocol.records.metric_states import (
    MetricState,
    Parts,
    Sum,
    exact_parts,
    merged,
    total_of,
)
from trireme_shared.protocol.records.record import Record


class TaskMeta(Record):
    """`digest`: of the file table; `tasks`: tasks of one epoch. `task_records`, `evaluation_task_records`:
    records of a task, so a table that is lost is cut again as it was; 0: the job was begun by a version that
    had 16 minibatches. `balanced`: lanes get equal shares; that version dealt the tasks as they came."""

    epoch: int
    digest: str
    seed: int
    tasks: int
    evaluation_tasks: int = 0
    evaluation_digest: str = ""
    task_records: int = 0
    evaluation_task_records: int = 0
    balanced: bool = False


class EpochPlan(Record):
    """What an epoch of the job is made of; trainers tell the script. `records`: those of all tasks, without
    `left_out`, which drop_last leaves out. `steps`: synchronous: updates of the model, the same number in
    each epoch; None: it differs by epoch, in a job that an earlier version began. Asynchronous: pushes, if
    one trainer did all of them. Discarded tasks make fewer."""

    records: int
    left_out: int = 0
    tasks: int
    task_records: int
    steps: int | None = None


class Attempt(Record):
    """One trainer that works on a task. `request`: the idempotency key that acquired it."""

    attempt: int
    trainer: str
    request: str = ""


class PendingTask(Record):
    """`remaining_s`: seconds to the deadline at the time of writing. `request`: the idempotency key that
    acquired the task. `others`: earlier attempts that may still finish it, because it was late and was given
    twice."""

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
        return next(
            (each for each in self.attempts if (each.attempt, each.trainer) == (attempt, trainer)), None
        )

    def without(self, lost: Collection[str]) -> PendingTask | None:
        """Without the earlier attempts of these trainers; None if the newest is theirs: whatever came before
        it may have given up."""
        if self.trainer in lost:
            return None
        return self.with_fields(others=tuple(each for each in self.others if each.trainer not in lost))


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


MAX_SUMS_BYTES = 200 * 1024


class EvaluationSums(Record):
    """Sums over the finished evaluation tasks; written in the transaction that finishes a task, so each
    counts once.

    `parts`: numbers whose exact sum is that of the tasks' values, so `sums` has the same bits in whatever
    order tasks end; of sums that one float cannot hold."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    sums: dict[str, Sum] = Field(default_factory=dict)
    finished: int = 0
    parts: dict[str, Parts] = Field(default_factory=dict)

    def plus(self, sums: Mapping[str, Sum], task: int) -> Self:
        """With one more task, of that number. Values that are not finite are added as floats. Raises
        InvalidArgument."""
        totals, parts = dict(self.sums), dict(self.parts)
        for name, value in sums.items():
            before = totals.get(name, 0.0 if not isinstance(value, MetricState) else None)
            if isinstance(value, MetricState) or isinstance(before, MetricState):
                own = value.of_task(task) if isinstance(value, MetricState) else value
                totals[name] = merged(name, before, own)
                continue
            exact = exact_parts(parts.pop(name, ()) or (before or 0.0,), value)
            totals[name] = total_of(exact)
            if len(exact) > 1:
                parts[name] = exact
        return self.with_fields(sums=totals, parts=parts, finished=self.finished + 1)

    @property
    def numbers(self) -> dict[str, float]:
        """The sums without states of metric objects."""
        return {name: value for name, value in self.sums.items() if not isinstance(value, MetricState)}

    def bounded(self) -> Self:
        """Itself, if it fits into one value of the job's state. Raises TooLarge, which names the largest."""
        self.room()
        return self

    def room(self) -> int:
        """How many bytes they may still grow by. Raises TooLarge as `bounded`."""
        if (size := len(self.to_bytes())) <= MAX_SUMS_BYTES:
            return MAX_SUMS_BYTES - size
        states = {name: value for name, value in self.sums.items() if isinstance(value, MetricState)}
        if not states:
            msg = (
                f"the evaluation has {len(self.sums)} sums of {size} bytes, at most {MAX_SUMS_BYTES} bytes "
                "are taken"
            )
            raise TooLarge(msg, hint="return the same few names, and short ones, for every minibatch")
        sizes = {name: len(value.to_bytes()) for name, value in states.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        grows = bool(states[largest].tensors)
        seen = f"after {self.finished} tasks" if self.finished else "in one task"
        msg = (
            f"the metric {largest} of the evaluation has {sizes[largest]} bytes {seen}, "
            f"at most {MAX_SUMS_BYTES} bytes are taken of all metrics and sums ({size} now)"
        )
        if grows:
            msg += f": it keeps values of every record ({', '.join(states[largest].tensors)})"
        hint = (
            "use one whose size does not grow with the records: trireme.metrics.AUC, or the metric's own "
            "thresholds=100; or a smaller evaluation dataset"
            if grows
            else "give it fewer classes, bins or thresholds"
        )
        raise TooLarge(msg, hint=hint)


def refused_sums(error: CallerError) -> UserCodeError:
    """Sums or metrics of an evaluation that cannot be kept, or do not fit together, as an error that ends the
    job."""
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    return UserCodeError(message, error_type=error.code, error_message=message, fatal=True)


def check_size(metrics: Mapping[str, float]) -> None:
    """Raises TooLarge if the job's state does not take the metrics of an evaluation."""
    if (size := len(json.dumps(dict(metrics)))) > MAX_SUMS_BYTES:
        msg = (
            f"the evaluation has {len(metrics)} metrics of {size} bytes as JSON, at most {MAX_SUMS_BYTES} "
            "bytes are taken"
        )
        raise TooLarge(
            msg, hint="give fewer of them, or shorter names: metrics(sums) in the script says which"
        )


class ValidationSums(EvaluationSums):
    """Of the evaluation that runs while the job trains."""


class Deaths(Record):
    """Processes that died in a row at one place of a task: at a minibatch, or (-1) while its records were
    read. `trainers`: their ids, each once; `cause`: how the last one died, for people."""

    epoch: int
    task_id: str
    minibatch: int
    trainers: tuple[str, ...]
    cause: str


class FailureCounts(Record):
    """Failures of the user's code so far. `seen`: digest of an error -> how often, for the first few errors.
    `deaths`: of each task at which processes died, and that no trainer has completed since, the last place;
    the last ones."""

    total: int = 0
    seen: dict[str, int] = Field(default_factory=dict)
    deaths: tuple[Deaths, ...] = ()

    def has_died_at(self, epoch: int, task_id: str) -> bool:
        """Whether a process died at that task since a trainer completed it."""
        return any((each.epoch, each.task_id) == (epoch, task_id) for each in self.deaths)

    def without(self, epoch: int, task_id: str) -> Self:
        """A trainer has got past all of that task: whatever died there did so by chance."""
        left = tuple(each for each in self.deaths if (each.epoch, each.task_id) != (epoch, task_id))
        return self.with_fields(deaths=left)


def error_digest(error_type: str, message: str) -> str:
    """A short name for an error, however long its message."""
    return hashlib.sha256(f"{error_type}\0{message}".encode()).hexdigest()[:16]
