"""Whether a report can be true: who sends it, and the numbers in it. Reports are no tasks, so no attempt fences them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from master_service.core.changes import Decision, Event
from master_service.core.state.job import Job
from master_service.core.state.kept import KEPT_EVENTS
from trireme_shared.protocol.errors import InvalidArgument, NotFound
from trireme_shared.protocol.events import MESSAGE
from trireme_shared.protocol.records import MetricBatch, StepMetrics, UserFailure
from trireme_shared.protocol.records.record import shortened


def current_metrics(job: Job, batch: MetricBatch) -> MetricBatch:
    """Without steps that a rollback undid, and the times they took: their report is late. Raises NotFound unless a trainer of the job
    sends it; InvalidArgument for a step that the job cannot have."""
    check_trainer(job, batch.trainer)
    current = tuple(share for share in batch.steps if share.timeline == job.state.timeline)
    for share in current:
        if wrong := _impossible(job, share):
            raise InvalidArgument(f"{batch.trainer} reports step {share.step} of epoch {share.epoch}: {wrong}")
    times = batch.times if batch.times is not None and batch.times.timeline == job.state.timeline else None
    if times is not None and not 0 <= times.step < most_steps(job):
        raise InvalidArgument(f"{batch.trainer} reports step {times.step}: the job has at most {most_steps(job)} steps")
    return batch.with_fields(steps=current, times=times)


def warnings_told(job: Job, warnings: Sequence[str]) -> Decision[None]:
    """As events of the job, without those that are among its events."""
    told = {event.message for event in job.events.after(0, KEPT_EVENTS) if event.name == "warning"}
    new = [text for text in dict.fromkeys(shortened(text, MESSAGE) for text in warnings) if text not in told]
    return Decision(None, (), tuple(Event("warning", text) for text in new))


def check_failure(member_id: str, failure: UserFailure) -> None:
    """Raises InvalidArgument for a failure without a name, or of another trainer than the one that reports it."""
    if failure.trainer not in ("", member_id):
        raise InvalidArgument(f"{member_id} reports a failure of {failure.trainer}; each trainer reports its own")
    if not failure.error_type.strip():
        raise InvalidArgument(f"{member_id} reports a failure without error_type; name the exception")


def check_trainer(job: Job, member_id: str) -> None:
    """Raises NotFound."""
    if member_id not in job.members.trainers and member_id not in job.trainers:
        raise NotFound(
            f"no trainer {member_id} is registered in job {job.spec.job}; only trainers report what they trained"
        )


def most_steps(job: Job) -> int:
    """The job has no more steps: every task of the longest stream, in every epoch."""
    streams, spec = job.training.streams, job.spec
    longest = max(streams.length(number) for number in range(streams.count))
    task_records = streams.table.task_records if streams.table is not None else 0
    return spec.epochs * longest * -(-task_records // spec.minibatch_size)


def _impossible(job: Job, share: StepMetrics) -> str:
    """Why the job cannot have such a step, or ""."""
    records, most = job.training.streams.records, most_steps(job)
    if not 0 <= share.step < most:
        return f"the job has at most {most} steps, numbered from 0"
    if not 0 <= share.epoch <= job.training.epoch:
        return f"epoch {job.training.epoch} is under way"
    if not 0 <= share.records <= records:
        return f"it has {share.records} records, an epoch has {records}"
    return "" if math.isfinite(share.loss_sum) else f"its loss_sum is {share.loss_sum}"
