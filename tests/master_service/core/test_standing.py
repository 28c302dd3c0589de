"""Where a job is once its term has ended: as it ended, or as was asked for last."""

from __future__ import annotations

import pytest

from master_service.core.decisions.standing import finish
from shared.records.cluster import Standing
from tests.master_service.core.cluster_jobs import active, job_of, state_of

STAMP = "2027-01-15T08:00:00.000+00:00"


@pytest.mark.parametrize(
    ("ended", "wanted", "then"),
    [
        (Standing.PAUSED, "pause", Standing.PAUSED),
        (Standing.PAUSED, "run", Standing.QUEUED),  # resumed while it wrote its checkpoint
        (Standing.PAUSED, "cancel", Standing.CANCELLED),
        (Standing.QUEUED, "run", Standing.QUEUED),
        (Standing.QUEUED, "pause", Standing.PAUSED),
        (Standing.QUEUED, "cancel", Standing.CANCELLED),
        (Standing.CANCELLED, "cancel", Standing.CANCELLED),
        (Standing.COMPLETED, "pause", Standing.COMPLETED),
        (Standing.FAILED, "cancel", Standing.FAILED),
    ],
)
def test_a_job_that_stops_becomes_what_was_asked_for_last(ended, wanted, then):
    state = state_of(active("a", wanted=wanted, preempted_by="b"))
    (change,) = finish(state, "a", ended, "it stopped", STAMP).changes
    assert (change.job.standing, change.job.preempted_by) == (then, "")
    assert change.job.end_time == (STAMP if then.final else "")


def test_a_job_that_another_term_has_ended_stays_as_it_is():
    state = state_of(job_of("a", standing=Standing.PAUSED))
    assert finish(state, "a", Standing.COMPLETED, "done", STAMP).changes == ()
