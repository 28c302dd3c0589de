"""What a decision wants to change: values that name the change. How etcd stores it is in store/schema.py.

A record that the job has once, an Operation or a KeptAnswer is a change by itself: it takes the place of the
one before.

decision(job, now) -> Decision(answer, changes, events)     nothing has happened yet
commit(changes) in one txn -> job.apply(changes)            now it has
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from typing_extensions import TypeVar

from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus
from trireme_shared.protocol.events import EventFields
from trireme_shared.protocol.records import (
    Attempt,
    DiscardedTask,
    EvaluationSums,
    JobSpec,
    JobState,
    PendingTask,
    RequeuedTask,
    SlotMap,
    TaskKind,
    TrainerList,
    ValidationSums,
)
from trireme_shared.protocol.records.assignments import GivenNumbers, Migration
from trireme_shared.protocol.records.checkpoints import CheckpointCut
from trireme_shared.protocol.records.job import Losses, Pause
from trireme_shared.protocol.records.operations import KeptAnswer, Operation
from trireme_shared.protocol.records.queue import FailureCounts

Fields = EventFields


@dataclass(frozen=True, slots=True)
class PutCursor:
    stream: str
    position: int


@dataclass(frozen=True, slots=True)
class PutPending:
    """`ended`: an attempt at it that was reported to have failed, while a newer one goes on."""

    task_id: str
    task: PendingTask
    ended: Attempt | None = None


@dataclass(frozen=True, slots=True)
class DropPending:
    """`reported`: the trainer (or its lane's progress) said so. A second report of the same end is then
    recognised. `by`: which of several attempts it was; None: the newest."""

    task_id: str
    reported: bool = False
    by: Attempt | None = None


@dataclass(frozen=True, slots=True)
class PutRequeued:
    task_id: str
    task: RequeuedTask


@dataclass(frozen=True, slots=True)
class DropRequeued:
    task_id: str


@dataclass(frozen=True, slots=True)
class PutDiscarded:
    """`records`: how many are lost with the task."""

    task_id: str
    task: DiscardedTask
    records: int


@dataclass(frozen=True, slots=True)
class DropDiscarded:
    """The task is given out again: the job went back to a point before it was discarded."""

    task_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """Training starts `epoch` (an earlier one after a rollback): all cursors are 0, nothing is pending or
    requeued. The last change of its transaction."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RestartQueue:
    """Evaluation or export starts anew: nothing of it is given out, done or discarded. Like NextEpoch it
    takes any number of tasks with few operations; no later change of its transaction is about that queue."""

    kind: TaskKind


@dataclass(frozen=True, slots=True)
class ForgetParameters:
    """Layout and init_ps/done are deleted: a trainer initialises the parameters again."""


@dataclass(frozen=True, slots=True)
class PutPause:
    """Asynchronous trainers stop. The key has the master's lease, so the pause ends with the master."""

    pause: Pause
    lease: int


@dataclass(frozen=True, slots=True)
class DropPause:
    """Trainers continue."""


@dataclass(frozen=True, slots=True)
class PutCut:
    uuid: str
    cut: CheckpointCut


@dataclass(frozen=True, slots=True)
class DropCut:
    """From now on the checkpoint cannot be committed."""

    uuid: str


@dataclass(frozen=True, slots=True)
class DesirePservers:
    """So many indices may be claimed by parameter servers."""

    count: int


@dataclass(frozen=True, slots=True)
class DropMigration:
    """No slots move any more: what was handed over and is not in the slot map stays where it was."""


@dataclass(frozen=True, slots=True)
class RequireLatest:
    """Changes nothing: the transaction is refused if `checkpoints/latest` was written after that revision (0:
    if it exists)."""

    revision: int


@dataclass(frozen=True, slots=True)
class DropOperation:
    """It ended, and newer ones that ended take its place."""

    operation_id: str


@dataclass(frozen=True, slots=True)
class DropEvaluation:
    """Newer ones take its place."""

    number: int


@dataclass(frozen=True, slots=True)
class DropEvaluationsAfter:
    """The job went back to a version before them: they will come again."""

    number: int


@dataclass(frozen=True, slots=True)
class DropAnswer:
    """Its request is forgotten: it is too old, or newer ones take its place."""

    key: str


@dataclass(frozen=True, slots=True)
class PutEvents:
    """One transaction's events, `first` to `last`, as etcd holds them (an EventChunk)."""

    first: int
    last: int
    value: bytes


@dataclass(frozen=True, slots=True)
class DropEvents:
    """Those that were told before that id are not kept any more. It is the first id of what one transaction
    told."""

    before: int


JobRecord = (
    JobSpec
    | JobState
    | TrainerList
    | SlotMap
    | FailureCounts
    | EvaluationSums
    | ValidationSums
    | EvaluationStatus
    | Losses
    | Migration
    | GivenNumbers
)
Change = (
    JobRecord
    | Operation
    | KeptAnswer
    | DropAnswer
    | Evaluation
    | DropEvaluation
    | DropEvaluationsAfter
    | PutCursor
    | PutPending
    | DropPending
    | PutRequeued
    | DropRequeued
    | PutDiscarded
    | DropDiscarded
    | NextEpoch
    | RestartQueue
    | ForgetParameters
    | PutPause
    | DropPause
    | PutCut
    | DropCut
    | DesirePservers
    | DropMigration
    | RequireLatest
    | DropOperation
    | PutEvents
    | DropEvents
)


@dataclass(frozen=True, slots=True)
class Event:
    """A state change for people and the log: `name` is stable, `message` a sentence, `fields` JSON values."""

    name: str
    message: str
    fields: Fields = field(default_factory=dict)


Answer_co = TypeVar("Answer_co", covariant=True)
Change_co = TypeVar("Change_co", covariant=True, default=Change)
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class Decision(Generic[Answer_co, Change_co]):
    """What to answer, change and tell. Its changes are those of a job unless it says others
    (state/cluster.py)."""

    answer: Answer_co
    changes: tuple[Change_co, ...] = ()
    events: tuple[Event, ...] = ()

    def __add__(self, other: Decision[object, Other]) -> Decision[Answer_co, Change_co | Other]:
        """The answer of the first; the changes and events of both, in order."""
        return Decision(self.answer, self.changes + other.changes, self.events + other.events)
