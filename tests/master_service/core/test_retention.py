"""Which jobs are deleted by themselves, and what holds for a job that is being deleted."""

from __future__ import annotations

import pytest

from master_service.core.decisions import cluster_jobs
from master_service.core.decisions.cluster_jobs import due_for_deletion
from tests.master_service.cluster import spec_of
from tests.master_service.core.cluster_jobs import WALL, active, job_of, state_of
from trireme_shared.protocol.errors import Conflict, InvalidArgument
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.job_choices import Mode
from trireme_shared.protocol.times import rfc3339


def ended(name: str, seconds_ago: float, standing: Standing = Standing.COMPLETED, **fields):
    return job_of(name, standing=standing, end_time=rfc3339(WALL - seconds_ago), **fields)


def test_jobs_go_once_their_retention_is_over_the_longest_ended_first():
    jobs = [
        ended("a", 100, Standing.FAILED),
        ended("b", 50),
        ended("c", 200, Standing.CANCELLED),
        active("d"),
    ]
    state = state_of(*jobs, job_of("e"), job_of("f", standing=Standing.PAUSED))
    assert due_for_deletion(state, WALL, 60.0) == ["c", "a"]
    assert due_for_deletion(state, WALL, 10.0) == ["c", "a", "b"]
    assert due_for_deletion(state, WALL, None) == []


def test_a_job_that_another_waits_for_and_one_with_post_tasks_stay():
    spec = spec_of(job="p", mode=Mode.ASYNC, post_tasks=("publish",))
    state = state_of(ended("a", 100), job_of("b", after=("a",)), ended("p", 100, spec=spec))
    assert due_for_deletion(state, WALL, 60.0) == []


def test_a_deletion_that_was_begun_is_due_whatever_the_retention_is_and_the_job_is_closed():
    state = state_of(ended("a", 1), ended("f", 1, Standing.FAILED))
    for name in "af":
        for change in cluster_jobs.begin_delete(state, name).changes:
            state.apply(change, 0.0)
    assert due_for_deletion(state, WALL, None) == ["a", "f"]
    with pytest.raises(Conflict, match="is being deleted"):
        cluster_jobs.resume(state, "f")
    with pytest.raises(InvalidArgument, match="comes after job a, which does not exist"):
        cluster_jobs.create(state, job_of("b", after=("a",)), None, "now")
    assert cluster_jobs.begin_delete(state, "a").changes == ()


def test_keys_go_only_after_the_deletion_was_begun():
    with pytest.raises(Conflict, match="was not begun"):
        cluster_jobs.delete(state_of(ended("a", 1)), "a", "now")
