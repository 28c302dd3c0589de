"""The job as a whole: phases, stages, and what users' errors may cost.

WAITING --parameters initialised, a trainer there--> RUNNING: TRAIN -> EVALUATE -> EXPORT -> COMPLETED (DONE)
   |                                                    |
   +-------- too many users' errors, lost pserver, too much discarded ------> FAILED
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from master_service.core.changes import Decision, Event, PutState
from shared.records import JobSpec, JobState, Phase, Stage, UserFailure

REMEMBERED_ERRORS = 256


def next_stage(spec: JobSpec, stage: Stage) -> Stage:
    match stage:
        case Stage.TRAIN:
            return Stage.EVALUATE if spec.evaluation_dataset else Stage.EXPORT
        case Stage.EVALUATE:
            return Stage.EXPORT
        case Stage.EXPORT | Stage.DONE:
            return Stage.DONE


def fail(state: JobState, reason: str, failure: UserFailure | None = None) -> Decision[None]:
    """The end of the job; a job that is over stays as it is."""
    if state.phase.final:
        return Decision(None)
    failed = state.model_copy(update={"phase": Phase.FAILED, "reason": reason, "failure": failure})
    fields: dict[str, str | int | float | bool] = {"reason": reason}
    if failure:
        fields |= {"error_type": failure.error_type, "task": failure.task, "trainer": failure.trainer}
    return Decision(None, (PutState(failed),), (Event("job_failed", reason, fields),))


@dataclass
class FailureBudget:
    """Counts the users' errors that may fail a job. In memory: a new master starts a new budget.

    Before the first committed step the same error twice is enough: it would fail for ever. A failure inside a task after
    that is the task's own affair (it is discarded when its failures are spent); one outside tasks always counts.
    """

    allowed: int
    started: bool = False
    total: int = 0
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, failure: UserFailure, *, in_task: bool) -> str:
        """In place. Why the job must fail now, or ""."""
        if in_task and self.started:
            return ""
        self.total += 1
        error = (failure.error_type, failure.message)
        if len(self.seen) < REMEMBERED_ERRORS or error in self.seen:
            self.seen[error] += 1
        if not self.started and self.seen[error] >= 2:
            return f"{failure.error_type} twice before the first step was done: {failure.message}"
        if self.total >= self.allowed:
            return f"{self.total} failures of the user's code (max_user_failures {self.allowed}), the last: {failure.error_type}: {failure.message}"
        return ""
