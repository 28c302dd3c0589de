"""The end of a task and the next one in one decision, hence in one transaction: both have happened, or neither.

complete --ends more than the task: an epoch, a stage--> Completed(next=None): ask again on the books after it
         --else--> acquire on the same books --a task--> Completed(next=task)
"""

from __future__ import annotations

from master_service.core.state.changes import Decision, DropPending, PutLosses, PutSums
from master_service.core.state.job import Job, acquire, complete
from shared.errors import TriremeError
from shared.records import AcquireTask, Completed, CompleteTask, Task


def complete_and_take(job: Job, task_id: str, report: CompleteTask) -> Decision[Completed]:
    """Raises StaleAttempt, NotFound, NotReady: then no task is taken either. A refusal of the next one is no error."""
    done = complete(job, task_id, report)
    taken = _taken(job, task_id, report, done)
    return Decision(Completed(next=taken.answer)) + done + taken


def _taken(job: Job, task_id: str, report: CompleteTask, done: Decision[None]) -> Decision[Task | None]:
    """`books` still hold the task that ends: that it is gone must make no difference to who asks for another."""
    nothing: Decision[Task | None] = Decision(None)
    if report.next is None or not all(isinstance(change, DropPending | PutLosses | PutSums) for change in done.changes):
        return nothing
    held = job.queue_of(task_id).pending.get(task_id)
    if done.changes and held is not None and held.record.request == report.next.request:
        return nothing  # the id of the request that got the task which ends
    ask = AcquireTask(trainer=report.trainer, request=report.next.request, generation=report.next.generation)
    try:
        found = acquire(job, ask)
    except TriremeError:
        return nothing
    return Decision(found.answer.task, found.changes, found.events)
