"""Requests about jobs: what they change, and what is refused with both values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from master_service.core.decisions import cluster_jobs
from master_service.core.state.cluster import ClusterState, DropJob, DropSource, PutJob, PutSource
from tests.master_service.cluster import spec_of
from tests.master_service.core.cluster_jobs import WALL, active, deleted, job_of, state_of
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound
from trireme_shared.protocol.records.cluster import ClusterJob, Source, Standing
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job_choices import RESERVED, Mode
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.rest_cluster import CreateJob
from trireme_shared.protocol.times import rfc3339

STAMP = "2027-01-15T08:00:00.000+00:00"
ENDS = (Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED)


def create(state: ClusterState, asked: ClusterJob, source: Source | None = None) -> ClusterJob:
    decision = cluster_jobs.create(state, asked, source, STAMP)
    for change in decision.changes:
        state.apply(change, 0.0)
    return decision.answer


# ---------------------------------------------------------------- create


def test_a_new_job_is_queued_behind_the_others():
    state = state_of()
    create(state, job_of("a"))
    made = create(state, job_of("b", priority=70, source_digest="d"))
    assert made == job_of(
        "b", 2, priority=70, source_digest="d", create_time=STAMP, reason="was just submitted"
    )
    assert state.jobs["b"] == made


def test_fields_that_only_the_leader_writes_are_not_taken_from_the_request():
    made = create(state_of(), active("a", epoch=7, end_time="x", preempted_by="y"))
    assert (made.standing, made.epoch, made.end_time, made.preempted_by) == (Standing.QUEUED, 0, "", "")


def test_a_script_is_stored_with_its_first_job_and_goes_with_the_last():
    state, script = state_of(), Source(file_name="train.py", text="model = 1")
    decision = cluster_jobs.create(state, job_of("a", source_digest=script.digest), script, STAMP)
    assert decision.changes == (PutSource(script.digest, script), PutJob(decision.answer))
    for name in "ab":
        ended = {"source_digest": script.digest, "standing": Standing.COMPLETED}
        state.apply(PutJob(job_of(name).model_copy(update=ended)), 0.0)
    assert deleted(state, "a").changes == (DropJob("a"),)
    state.apply(DropJob("a"), 0.0)
    assert deleted(state, "b").changes == (DropJob("b"), DropSource(script.digest))


def test_a_name_is_taken_once():
    state = state_of(job_of("a"), job_of("old", standing=Standing.FAILED))
    with pytest.raises(Conflict, match="job a exists already; it is QUEUED"):
        create(state, job_of("a"))
    with pytest.raises(Conflict) as refused:
        create(state, job_of("old"))
    assert refused.value.hint == (
        "`trireme delete old` frees the name; to train it longer, choose another name and --init-from old"
    )


@pytest.mark.parametrize("name", RESERVED)
def test_names_of_the_clusters_own_keys_are_no_names_of_jobs(name):
    with pytest.raises(ValidationError, match="are keys of a cluster itself; choose another name"):
        spec_of(job=name)
    settings = JobSettings(dataset=TextLines("t"))
    with pytest.raises(ValidationError, match="are keys of a cluster itself"):
        CreateJob(name=name, settings=settings, script="s.py")


def test_a_synchronous_job_cannot_need_more_trainers_than_lanes():
    spec = spec_of(job="a", mode=Mode.SYNC, lanes=4, global_batch_size=4)
    with pytest.raises(InvalidArgument, match="min_trainers 5 is more than lanes 4"):
        create(state_of(), job_of("a", spec=spec, min_trainers=5))


def test_jobs_come_after_known_ones_that_may_still_complete():
    state = state_of(job_of("a"), job_of("bad", standing=Standing.CANCELLED))
    assert create(state, job_of("b", after=("a",))).scheduling.after == ("a",)
    with pytest.raises(InvalidArgument, match="job c comes after job nobody, which does not exist"):
        create(state, job_of("c", after=("nobody",)))
    with pytest.raises(InvalidArgument, match="job bad, which is CANCELLED and will never be COMPLETED"):
        create(state, job_of("c", after=("bad",)))
    with pytest.raises(InvalidArgument, match="job c cannot come after itself"):
        create(state, job_of("c", after=("c",)))


def test_a_circle_over_a_name_that_is_taken_again_is_refused():
    state = state_of(job_of("b", after=("a",)), job_of("c", after=("b",)))
    with pytest.raises(InvalidArgument, match="a after c after b after a"):
        create(state, job_of("a", after=("c",)))


def test_jobs_are_bounded():
    jobs = [job_of(f"j{number}", standing=Standing.PAUSED) for number in range(cluster_jobs.MAX_OPEN)]
    with pytest.raises(Conflict, match="1000 jobs of the cluster have not ended, at most 1000"):
        create(state_of(*jobs), job_of("a"))
    state = state_of(*jobs[1:])
    create(state, job_of("a"))


def ended(name: str, number: int, **fields):
    return job_of(name, standing=Standing.COMPLETED, end_time=rfc3339(WALL + number), **fields)


def test_jobs_that_have_ended_never_stop_a_submission_the_one_that_ended_first_goes(monkeypatch):
    monkeypatch.setattr(cluster_jobs, "MAX_JOBS", 5)
    state = state_of(
        ended("late", 9, source_digest="s"),
        ended("early", 1, source_digest="e"),
        ended("waited-for", 0),
        job_of("waits", after=("waited-for",)),
        ended("deleted", 0, wanted="delete"),
    )
    create(state, job_of("a", source_digest="s"))
    assert state.jobs.keys() == {"late", "waited-for", "waits", "deleted", "a"}
    decision = cluster_jobs.create(state, job_of("b", source_digest="s"), None, STAMP)
    assert DropJob("late") in decision.changes
    assert DropSource("s") not in decision.changes, "the new job runs the same script"
    event = decision.events[0]
    assert (event.name, event.fields) == ("job_forgotten", {"job": "late"})
    assert "is forgotten for job b: the cluster keeps 5 jobs. Its files stay in " in event.message
    for change in decision.changes:
        state.apply(change, 0.0)
    with pytest.raises(Conflict, match="keeps 5 jobs, at most 5, and needs each of them"):
        create(state, job_of("c"))


def test_a_forgotten_jobs_script_goes_with_it(monkeypatch):
    monkeypatch.setattr(cluster_jobs, "MAX_JOBS", 1)
    state = state_of(ended("old", 1, source_digest="s"))
    decision = cluster_jobs.create(state, job_of("new"), None, STAMP)
    assert [*decision.changes[:2]] == [DropJob("old"), DropSource("s")]


def test_as_many_jobs_have_ended_as_are_kept_and_the_next_one_is_taken_quickly():
    state = state_of()
    state.jobs = {f"e{number}": ended(f"e{number}", number) for number in range(cluster_jobs.MAX_JOBS)}
    create(state, job_of("a"))
    assert "e0" not in state.jobs
    assert len(state.jobs) == cluster_jobs.MAX_JOBS


# ---------------------------------------------------------------- the others

QUEUED, ACTIVE, PAUSED = (
    job_of("a", 1),
    active("a", 1),
    job_of("a", 1, standing=Standing.PAUSED, wanted="pause"),
)


@pytest.mark.parametrize(
    ("ask", "job", "standing", "wanted"),
    [
        ("pause", QUEUED, Standing.PAUSED, "pause"),
        ("pause", ACTIVE, Standing.ACTIVE, "pause"),
        ("resume", PAUSED, Standing.QUEUED, "run"),
        ("resume", job_of("a", 1, standing=Standing.FAILED, end_time=STAMP), Standing.QUEUED, "run"),
        ("resume", ACTIVE.model_copy(update={"wanted": "pause"}), Standing.ACTIVE, "run"),
        ("cancel", QUEUED, Standing.CANCELLED, "cancel"),
        ("cancel", PAUSED, Standing.CANCELLED, "cancel"),
        ("cancel", ACTIVE, Standing.ACTIVE, "cancel"),
        ("cancel", ACTIVE.model_copy(update={"wanted": "pause"}), Standing.ACTIVE, "cancel"),
    ],
)
def test_a_request_changes_the_job_once(ask, job, standing, wanted):
    state = state_of(job)
    given = (STAMP,) if ask == "cancel" else ()
    decision = getattr(cluster_jobs, ask)(state, "a", *given)
    assert (decision.answer.standing, decision.answer.wanted) == (standing, wanted)
    assert decision.changes == (PutJob(decision.answer),)
    assert decision.answer.end_time == (STAMP if standing.final else "")
    state.apply(decision.changes[0], 0.0)
    again = getattr(cluster_jobs, ask)(state, "a", *given)
    assert (again.answer, again.changes, again.events) == (decision.answer, (), ())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ask", ["pause", "resume", "cancel"])
def test_a_job_that_has_ended_stays_as_it_is(ask, end):
    state = state_of(job_of("a", standing=end))
    given = (STAMP,) if ask == "cancel" else ()
    if (ask, end) in {("cancel", Standing.CANCELLED), ("resume", Standing.FAILED)}:
        return  # said above
    with pytest.raises(Conflict, match=f"job a is {end}: it cannot be"):
        getattr(cluster_jobs, ask)(state, "a", *given)


@pytest.mark.parametrize("ask", ["pause", "resume"])
def test_a_job_that_is_being_cancelled_is_not_asked_for_anything_else(ask):
    with pytest.raises(Conflict, match="is being cancelled"):
        getattr(cluster_jobs, ask)(state_of(active("a", wanted="cancel")), "a")


@pytest.mark.parametrize("ask", ["pause", "resume", "cancel", "delete"])
def test_unknown_jobs_are_not_found(ask):
    with pytest.raises(NotFound, match="there is no job x"):
        getattr(cluster_jobs, ask)(state_of(), "x", *((STAMP,) if ask in ("cancel", "delete") else ()))


@pytest.mark.parametrize("end", ENDS)
def test_a_job_is_deleted_once_it_has_ended(end):
    state = state_of(job_of("a", standing=end))
    assert deleted(state, "a").changes == (DropJob("a"),)
    state = state_of(active("a"))
    with pytest.raises(Conflict, match="job a is ACTIVE: only jobs that are"):
        deleted(state, "a")


def test_a_completed_job_is_kept_while_another_waits_to_come_after_it():
    state = state_of(job_of("a", standing=Standing.COMPLETED), active("x"), job_of("b", after=("a", "x")))
    with pytest.raises(Conflict, match="job b comes after job a and has not started yet"):
        deleted(state, "a")
    state.apply(PutJob(active("b", after=("a", "x"))), 0.0)
    assert deleted(state, "a").changes == (DropJob("a"),)


def test_min_members_that_a_job_can_never_have_are_refused():
    spec = spec_of(
        job="a",
        mode=Mode.SYNC,
        strategy="collective",
        pservers=0,
        lanes=4,
        global_batch_size=4,
        min_members=3,
    )
    create(state_of(), job_of("a", spec=spec))
    with pytest.raises(
        InvalidArgument, match="min_members 3 is more than the 2 trainers that the job gets at most"
    ):
        create(state_of(), job_of("a", spec=spec, max_trainers=2))
