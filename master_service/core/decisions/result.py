"""What a completed job has to show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.records import CompleteTask, JobResult

if TYPE_CHECKING:
    from master_service.core.state.job_state import Books


def result(books: Books, report: CompleteTask | None) -> JobResult:
    """`report`: the export's; its sums are the user's `metrics(sums)`, else the sums themselves are the metrics."""
    discarded = list(books.training.discarded.values())
    lost = sum(change.records for change in discarded)
    return books.state.result.model_copy(
        update={
            "metrics": (report.sums if report else {}) or books.sums.sums,
            "exports": report.exports if report else {},
            "discarded_tasks": len(discarded),
            "discarded_records": lost,
            "losses": books.losses,
            "trained_records": books.spec.epochs * books.training.streams.records - lost,
        }
    )
