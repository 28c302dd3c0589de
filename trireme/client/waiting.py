"""How long a client waits for a job or an operation, and what came of it. Nothing here sends or sleeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from trireme_shared.protocol.errors import CursorExpired, DeadlineExceeded, from_map
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import Operation, OperationState
from trireme_shared.protocol.rest import JobView, ResizeView

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


@dataclass(frozen=True, slots=True)
class EventGap:
    """Events that the log had forgotten before they were asked for. `after`: the last cursor. `resume_after`: where what is kept
    begins. `lost`: how many are between them; None if `after` is of another log (the job was made anew), so nobody knows."""

    after: int
    resume_after: int
    lost: int | None

    @classmethod
    def of(cls, after: int, error: CursorExpired) -> EventGap:
        """Raises `error` if it does not say where to go on."""
        oldest, newest = error.details.get("oldest"), error.details.get("newest")
        if not isinstance(oldest, int) or not isinstance(newest, int):
            raise error
        resume_after = max(0, oldest - 1)
        return cls(after, resume_after, resume_after - after if after < resume_after else None)

    @property
    def error(self) -> CursorExpired:
        """For who did not say what to do about it."""
        many = "events were" if self.lost is None else f"{self.lost} events after {self.after} were"
        return CursorExpired(
            f"{many} forgotten before they were read",
            hint=f"go on with after={self.resume_after}, or give on_gap",
            after=self.after,
            resume_after=self.resume_after,
            lost=self.lost,
        )


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
