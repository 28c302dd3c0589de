"""Schedules: their times, what was missed, and a job before that has not ended."""

from __future__ import annotations

import pytest

from master_service.core.decisions import job_schedules
from master_service.core.state.cluster import (
    ClusterState,
    DropSchedule,
    DropSource,
    PutJob,
    PutSchedule,
    PutSource,
)
from tests.master_service.cluster import spec_of
from tests.master_service.core.cluster_jobs import deleted, state_of
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound
from trireme_shared.protocol.records.cluster import JobSchedule, Scheduling, Source, Standing
from trireme_shared.protocol.times import instant

EIGHT = instant("2027-01-15T08:00:00Z")
MINUTE, DAY = 60.0, 86_400.0
SCRIPT = Source(file_name="train.py", text="model = 1")


def nightly(**fields) -> JobSchedule:
    defaults = {
        "name": "n",
        "cron": "0 9 * * *",
        "spec": spec_of(job="n", storage="s3://b/x/"),
        "source_digest": SCRIPT.digest,
    }
    return JobSchedule(**{**defaults, **fields})


def created(state: ClusterState, **fields) -> JobSchedule:
    decision = job_schedules.create_schedule(state, nightly(**fields), SCRIPT, EIGHT)
    for change in decision.changes:
        state.apply(change, 0.0)
    return decision.answer


def run(state: ClusterState, wall_time: float) -> list[str]:
    """As the leader does, until nothing is due. Names of the jobs that were created."""
    before = set(state.jobs)
    for _ in range(20):
        decision = job_schedules.run_due_schedule(state, wall_time)
        for change in decision.changes:
            state.apply(change, 0.0)
        if not decision.answer.again:
            return sorted(set(state.jobs) - before)
    pytest.fail("schedules are due for ever")


def end(state: ClusterState, name: str, standing: Standing = Standing.COMPLETED) -> None:
    state.apply(PutJob(state.jobs[name].model_copy(update={"standing": standing})), 0.0)


# ---------------------------------------------------------------- create and delete


def test_a_schedule_knows_its_first_time_and_keeps_its_script():
    state = state_of()
    decision = job_schedules.create_schedule(state, nightly(), SCRIPT, EIGHT)
    assert decision.answer.next_time == "2027-01-15T09:00:00.000+00:00"
    assert decision.changes == (PutSource(SCRIPT.digest, SCRIPT), PutSchedule(decision.answer))
    assert "runs first at 2027-01-15T09:00:00" in decision.events[0].message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cron": "0 0 30 2 *"}, "names a day that no month has"),
        ({"cron": "tomorrow"}, "it has 1 fields"),
        ({"time_zone": "Nowhere"}, "time zone 'Nowhere' is not known"),
        ({"name": "n" * 51}, "51 characters, at most 50"),
        ({"scheduling": Scheduling(after=("a",))}, "after"),
        ({"scheduling": Scheduling(not_before_time="2027-01-15T09:00:00Z")}, "not_before_time"),
        (
            {"spec": spec_of(mode="sync"), "scheduling": Scheduling(min_trainers=5)},
            "min_trainers 5 is more than lanes 4",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(fields, words):
    state = state_of()
    with pytest.raises(InvalidArgument, match=words):
        created(state, **fields)
    assert state == state_of()


def test_a_name_has_one_schedule():
    state = state_of()
    created(state)
    with pytest.raises(Conflict, match="schedule n exists already"):
        created(state)


def test_a_deleted_schedule_leaves_its_jobs_and_the_script_that_they_run():
    state = state_of()
    created(state)
    (name,) = run(state, EIGHT + 61 * MINUTE)
    decision = job_schedules.delete_schedule(state, "n")
    assert decision.changes == (DropSchedule("n"),)
    state.apply(decision.changes[0], 0.0)
    end(state, name)
    assert DropSource(SCRIPT.digest) in deleted(state, name).changes
    with pytest.raises(NotFound, match="no schedule n"):
        job_schedules.delete_schedule(state, "n")


def test_a_script_that_only_a_schedule_needs_goes_with_it_and_not_before():
    state = state_of()
    created(state)
    (name,) = run(state, EIGHT + 61 * MINUTE)
    end(state, name)
    assert DropSource(SCRIPT.digest) not in deleted(state, name).changes
    state.jobs.clear()
    assert DropSource(SCRIPT.digest) in job_schedules.delete_schedule(state, "n").changes


# ---------------------------------------------------------------- times


def test_a_job_is_created_when_its_time_has_come_and_once():
    state = state_of()
    created(state)
    assert job_schedules.run_due_schedule(state, EIGHT).answer == job_schedules.ScheduleLook(
        again=False, next_look_s=60 * MINUTE
    )
    assert run(state, EIGHT + 60 * MINUTE) == ["n-202701150900"]
    assert run(state, EIGHT + 60 * MINUTE + 1) == []
    job, found = state.jobs["n-202701150900"], state.schedules["n"]
    assert (job.spec.job, job.spec.storage) == ("n-202701150900", "s3://b/x/n-202701150900")
    assert (job.standing, job.source_digest) == (Standing.QUEUED, SCRIPT.digest)
    assert (found.next_time, found.last_job) == ("2027-01-16T09:00:00.000+00:00", job.job)


def test_the_latest_of_missed_times_runs_once():
    state = state_of()
    created(state)
    assert run(state, EIGHT + 5 * DAY) == ["n-202701190900"]
    found = state.schedules["n"]
    assert found.next_time == "2027-01-20T09:00:00.000+00:00"
    assert found.reason == (
        "created job n-202701190900 for 2027-01-19T09:00:00.000+00:00 (times before it were missed)"
    )


def test_several_schedules_at_one_time_each_create_their_job():
    state = state_of()
    for name in "abc":
        created(state, name=name)
    names = run(state, EIGHT + 2 * DAY)
    assert names == [f"{name}-202701160900" for name in "abc"]
    assert sorted(job.number for job in state.jobs.values()) == [1, 2, 3]


def test_a_time_zone_that_the_leaders_host_does_not_know_stops_nothing_else():
    state = state_of()
    created(state)
    created(state, name="other")
    state.apply(PutSchedule(state.schedules["n"].model_copy(update={"time_zone": "Atlantis/Capital"})), 0.0)
    assert run(state, EIGHT + 60 * MINUTE) == ["other-202701150900"]
    found = state.schedules["n"]
    assert "time zone 'Atlantis/Capital' is not known here" in found.reason
    assert found.next_time == "2027-01-15T09:10:00.000+00:00"


# ---------------------------------------------------------------- the job before


def test_forbid_leaves_out_times_while_the_job_before_has_not_ended():
    state = state_of()
    created(state)
    (first,) = run(state, EIGHT + 60 * MINUTE)
    assert run(state, EIGHT + DAY + 60 * MINUTE) == []
    found = state.schedules["n"]
    assert found.reason == (
        "left out at 2027-01-16T09:00:00.000+00:00: job n-202701150900 of the time before is still QUEUED"
    )
    assert found.last_job == first
    end(state, first, Standing.FAILED)
    assert run(state, EIGHT + 2 * DAY + 60 * MINUTE) == ["n-202701170900"]


@pytest.mark.parametrize(
    ("standing", "then", "wanted"),
    [(Standing.QUEUED, Standing.CANCELLED, "cancel"), (Standing.ACTIVE, Standing.ACTIVE, "cancel")],
)
def test_replace_cancels_the_job_before(standing, then, wanted):
    state = state_of()
    created(state, concurrency="replace")
    (first,) = run(state, EIGHT + 60 * MINUTE)
    end(state, first, standing)
    assert run(state, EIGHT + DAY + 60 * MINUTE) == ["n-202701160900"]
    assert (state.jobs[first].standing, state.jobs[first].wanted) == (then, wanted)


def test_a_job_that_cannot_be_created_is_said_and_the_one_before_goes_on():
    state = state_of()
    created(state, concurrency="replace")
    (first,) = run(state, EIGHT + 60 * MINUTE)
    # somebody took the name
    state.apply(PutJob(state.jobs[first].model_copy(update={"job": "n-202701160900"})), 0.0)
    assert run(state, EIGHT + DAY + 60 * MINUTE) == []
    found = state.schedules["n"]
    assert "job n-202701160900 could not be created: job n-202701160900 exists already" in found.reason
    assert found.next_time == "2027-01-17T09:00:00.000+00:00"
    assert state.jobs[first].standing is Standing.QUEUED
