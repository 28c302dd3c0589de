"""How long a client waits for a job or an operation, and what came of it. Nothing here sends or sleeps."""

from __future__ import annotations

from typing import TypeVar

from master_service.api.resources import JobView, ResizeView
from shared.errors import DeadlineExceeded, from_map
from shared.records import Phase
from shared.records.cluster import Standing
from shared.records.operations import Operation, OperationState

LONG_POLL_S = 10.0
POLL_S = 0.5

Ended = TypeVar("Ended", Operation, ResizeView)
FINAL = frozenset({*(phase.value for phase in Phase if phase.final), *(each.value for each in Standing if each.final)})


def has_ended(job: JobView) -> bool:
    """COMPLETED, FAILED or CANCELLED. In a cluster its standing says so: its phase may be that of its last term."""
    return (job.standing or job.phase) in FINAL


def result_of(ended: Ended) -> Ended:
    """Raises the error that it FAILED with."""
    if ended.state is OperationState.FAILED:
        raise from_map(
            {"code": ended.error_code, "message": ended.reason, "details": {"ended": ended.model_dump(mode="json")}}
        )
    return ended


class Wait:
    """For `what`, at most `timeout_s`. Raises DeadlineExceeded with what it waits for."""

    def __init__(self, what: str, timeout_s: float, now: float) -> None:
        self._what, self._timeout_s, self._deadline = what, timeout_s, now + timeout_s

    def left(self, at_most_s: float, now: float) -> float:
        return min(at_most_s, max(0.0, self._deadline - now))

    def check(self, reason: str, now: float) -> None:
        if now >= self._deadline:
            msg = f"waited {self._timeout_s:g} s for {self._what}: {reason}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with timeout_s")

    def pause(self, seconds: float, reason: str, now: float) -> float:
        self.check(reason, now)
        return self.left(seconds, now)
