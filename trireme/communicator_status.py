"""How an operation of a communicator ended. Loads nothing, so that scripts can name SUCCEEDED and FAILED
before anything begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why an operation failed. `JOINED`: new members need the group's state: call `broadcast` of it.
    `MISMATCH`: the members called different things. `TIMEOUT`: not all members came within `timeout_s`.
    `CLOSED`: the communicator is closed, or cannot go on."""

    NONE = ""
    JOINED = "joined"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, eq=False)
class Status:
    """`status == trireme.SUCCEEDED` and `if status:` ask the same. `reason`: for people. `weight`: of all
    members together, of an allreduce. `number`, `epoch`: of the operation that succeeded, and where: equal in
    all members that have the same result."""

    succeeded: bool
    cause: Cause = Cause.NONE
    reason: str = ""
    weight: float = 0.0
    number: int = 0
    epoch: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and other.succeeded == self.succeeded

    def __hash__(self) -> int:
        return hash(self.succeeded)

    def __bool__(self) -> bool:
        return self.succeeded

    def __repr__(self) -> str:
        return (
            "SUCCEEDED"
            if self.succeeded
            else f"FAILED({self.cause}: {self.reason})"
            if self.cause
            else "FAILED"
        )

    @property
    def joined(self) -> bool:
        """New members need the group's state before anything else."""
        return self.cause is Cause.JOINED


SUCCEEDED = Status(succeeded=True)
FAILED = Status(succeeded=False)
