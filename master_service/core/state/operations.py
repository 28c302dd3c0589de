"""Requests that take long (checkpoints, verifications, restorations): those that run, and the last ones that ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from master_service.core.changes import Decision, DropOperation, Event, Fields
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState, ResizePhase
from trireme_shared.protocol.records.record import MESSAGE_CHARACTERS, shortened

KEPT = 50  # of those that ended


@dataclass
class Operations:
    """`since`: when this master first saw each one, by its own clock; `requested`: when it first saw it in `making`."""

    records: dict[str, Operation] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    requested: dict[str, float] = field(default_factory=dict)

    def apply(self, change: Operation | DropOperation, now: float) -> None:
        """In place."""
        match change:
            case Operation():
                self.records[change.operation_id] = change
                self.since.setdefault(change.operation_id, now)
                if not (change.after or change.joined):
                    self.requested.setdefault(change.operation_id, now)
            case DropOperation(operation_id):
                self.records.pop(operation_id, None)
                self.since.pop(operation_id, None)
                self.requested.pop(operation_id, None)

    def running(self, kind: OperationKind | None = None) -> list[Operation]:
        """Oldest first."""
        found = [operation for operation in self.records.values() if operation.running]
        found.sort(key=lambda operation: self.since[operation.operation_id])
        return [operation for operation in found if kind in (None, operation.kind)]

    def making(self) -> list[Operation]:
        """Those that checkpoints are made for, without those that wait for the next one or share it. Oldest first."""
        creating = self.running(OperationKind.CREATE_CHECKPOINT)
        return [operation for operation in creating if not (operation.after or operation.joined)]

    def number_of_trainers_asked(self) -> bool:
        """Whether a resize to a number of trainers is in force, or is being carried out."""
        return self.resize_in_force() is not None

    def resize_in_force(self) -> Operation | None:
        """The newest one that gave the job its number of trainers, or is about to."""
        found = [
            each
            for each in self.records.values()
            if each.resize is not None
            and each.resize.trainers_asked
            and each.resize.phase is not ResizePhase.PLANNED
            and not each.error_code
        ]
        return max(found, key=lambda each: self.since[each.operation_id], default=None)

    def find(self, operation_id: str) -> Operation:
        """Raises NotFound."""
        found = self.records.get(operation_id)
        if found is None:
            msg = f"operation {operation_id} does not exist (any more: the last {KEPT} that ended are kept)"
            raise NotFound(msg)
        return found


def end(operation: Operation, state: OperationState, reason: str, stamp: str, *, code: str = "") -> Decision[None]:
    reason = shortened(reason, MESSAGE_CHARACTERS)
    ended = operation.with_fields(state=state, reason=reason, error_code=code, end_time=stamp)
    name = "operation_done" if state is OperationState.DONE else "operation_failed"
    message = f"{operation.kind.value.lower().replace('_', ' ')}: {reason}"
    return Decision(None, (ended,), (Event(name, message, fields_of(ended)),))


def fields_of(operation: Operation) -> Fields:
    fields: Fields = {"operation": operation.operation_id, "kind": operation.kind.value, "attempt": operation.attempt}
    if operation.checkpoint_id:
        fields |= {"checkpoint": operation.checkpoint_id, "step": operation.step or 0}
    return fields
