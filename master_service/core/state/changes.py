"""What a decision wants written: values that name what changes, not how etcd spells it (store.py does that).

decision(books, now) -> Decision(answer, changes, events)     nothing has happened yet
commit(changes) in one txn -> books.apply(changes)            now it has
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.records import (
    DiscardedTask,
    EvaluationSums,
    JobState,
    LaneMap,
    PendingTask,
    RequeuedTask,
    SlotMap,
)
from shared.records.checkpoints import CheckpointCut
from shared.records.operations import Operation
from shared.records.pauses import Losses, Pause
from shared.records.queue import FailureCounts

Answer_co = TypeVar("Answer_co", covariant=True)


@dataclass(frozen=True, slots=True)
class PutCursor:
    stream: str
    position: int


@dataclass(frozen=True, slots=True)
class PutPending:
    task_id: str
    task: PendingTask


@dataclass(frozen=True, slots=True)
class DropPending:
    """`reported`: its trainer (or a lane's progress) said so, so that a doubled report is known."""

    task_id: str
    reported: bool = False


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
    """The task is given again: the job went back to before it was discarded."""

    task_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """Training is at `epoch` now (an earlier one after a roll-back): all cursors are 0, nothing is pending or requeued.
    Ends a group commit."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PutSums:
    sums: EvaluationSums


@dataclass(frozen=True, slots=True)
class PutFailures:
    counts: FailureCounts


@dataclass(frozen=True, slots=True)
class PutState:
    state: JobState


@dataclass(frozen=True, slots=True)
class PutLanes:
    lanes: LaneMap


@dataclass(frozen=True, slots=True)
class PutSlots:
    slots: SlotMap


@dataclass(frozen=True, slots=True)
class ForgetParameters:
    """Layout and init_ps/done go: somebody initialises the parameters anew."""


@dataclass(frozen=True, slots=True)
class PutLosses:
    losses: Losses


@dataclass(frozen=True, slots=True)
class PutPause:
    """Asynchronous trainers stop; under the master's lease, so that the pause ends with it."""

    pause: Pause
    lease: int


@dataclass(frozen=True, slots=True)
class DropPause:
    """Trainers go on."""


@dataclass(frozen=True, slots=True)
class PutCut:
    uuid: str
    cut: CheckpointCut


@dataclass(frozen=True, slots=True)
class DropCut:
    """The checkpoint can never be committed."""

    uuid: str


@dataclass(frozen=True, slots=True)
class PutOperation:
    """While a CREATE_CHECKPOINT is running, its request stands in `job/checkpoint`; it goes with the operation's end."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class DropOperation:
    """Ended long ago."""

    operation_id: str


Change = (
    PutCursor
    | PutPending
    | DropPending
    | PutRequeued
    | DropRequeued
    | PutDiscarded
    | DropDiscarded
    | NextEpoch
    | PutSums
    | PutFailures
    | PutState
    | PutLanes
    | PutSlots
    | ForgetParameters
    | PutLosses
    | PutPause
    | DropPause
    | PutCut
    | DropCut
    | PutOperation
    | DropOperation
)


@dataclass(frozen=True, slots=True)
class Event:
    """A state change for people and the log: `name` is stable, `message` a sentence, `fields` JSON values."""

    name: str
    message: str
    fields: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision(Generic[Answer_co]):
    answer: Answer_co
    changes: tuple[Change, ...] = ()
    events: tuple[Event, ...] = ()

    def __add__(self, other: Decision[object]) -> Decision[Answer_co]:
        """The answer of the first, the changes and events of both, in order."""
        return Decision(self.answer, self.changes + other.changes, self.events + other.events)
