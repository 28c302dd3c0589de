"""What a completed job has to show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.records import CompleteTask, JobResult

if TYPE_CHECKING:
    from master_service.core.state.job import Job


def result(job: Job, report: CompleteTask | None) -> JobResult:
    """`report`: the export's; its sums are the user's `metrics(sums)`, else the sums themselves are the metrics."""
    discarded = list(job.training.discarded.values())
    lost = sum(change.records for change in discarded)
    return job.state.result.model_copy(
        update={
            "metrics": (report.sums if report else {}) or job.sums.sums,
            "exports": report.exports if report else {},
            "discarded_tasks": len(discarded),
            "discarded_records": lost,
            "losses": job.losses,
            "trained_records": job.spec.epochs * job.training.streams.records - lost,
        }
    )
