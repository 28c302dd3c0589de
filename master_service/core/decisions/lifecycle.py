"""The job as a whole: phases, stages, and what users' errors may cost.

WAITING --parameters initialised, a trainer there--> RUNNING: TRAIN -> EVALUATE -> EXPORT -> COMPLETED (DONE)
   |                                                    |
   +-------- too many users' errors, lost pserver, too much discarded ------> FAILED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from master_service.core.state.changes import Decision, Event, PutFailures, PutState
from shared.records import JobSpec, JobState, Phase, Stage, UserFailure
from shared.records.queue import FailureCounts, error_digest

REMEMBERED_ERRORS = 64


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
    """Counts the users' errors that may fail a job; `counts` is what etcd holds, so a new master goes on counting.

    Before the first committed step the same error twice is enough: it would fail for ever. A failure inside a task after
    that is the task's own affair (it is discarded when its failures are spent); one outside tasks always counts.
    """

    allowed: int
    started: bool = False
    counts: FailureCounts = field(default_factory=FailureCounts)

    def spend(self, state: JobState, failure: UserFailure, *, in_task: bool) -> Decision[None]:
        """The counts after one more failure, and the end of the job if it was one too many."""
        if state.phase.final or (in_task and self.started):
            return Decision(None)
        error, total = error_digest(failure.error_type, failure.message), self.counts.total + 1
        times = self.counts.seen.get(error, 0) + 1
        kept = error in self.counts.seen or len(self.counts.seen) < REMEMBERED_ERRORS
        counts = FailureCounts(total=total, seen={**self.counts.seen, error: times} if kept else self.counts.seen)
        spent: Decision[None] = Decision(None, (PutFailures(counts),))
        what = f"{failure.error_type}: {failure.message}"
        if not self.started and times >= 2:
            reason = f"{failure.error_type} twice before the first step was done: {failure.message}"
        elif total >= self.allowed:
            reason = f"{total} failures of the user's code (max_user_failures {self.allowed}), the last: {what}"
        else:
            return spent
        return spent + fail(state, reason, failure)


def state_after(state: JobState, decision: Decision[Any]) -> JobState:
    return next((change.state for change in decision.changes if isinstance(change, PutState)), state)
