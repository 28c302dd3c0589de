"""Where a job is once its term has ended: as it ended, or as was asked for last."""

from __future__ import annotations

import pytest

from master_service.core.decisions.cluster_jobs import finish, follow_resize
from master_service.core.state.cluster import ClusterState, DropAssignment, PutAssignment, PutJob
from tests.master_service.core.cluster_jobs import active, job_of, state_of
from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, Outcome, Standing

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


def test_the_pool_follows_a_resize_and_takes_back_parameter_servers_without_an_index() -> None:
    job = job_of("a", pservers=1)
    state = ClusterState()
    state.apply(PutJob(job.model_copy(update={"standing": Standing.ACTIVE, "epoch": 1})), 0.0)
    assert not follow_resize(state, "a", job.spec, 1, set(), asked=False).answer
    for grown, wanted in ((3, {"p0", "p1", "p2"}), (1, {"p1"})):
        live = job.spec.model_copy(update={"pservers": grown, "trainers": 4})
        decided = follow_resize(state, "a", live, grown, set(), asked=False)
        assert decided.answer
        for change in decided.changes:
            state.apply(change, 0.0)
        assert (state.job("a").pservers_wanted, state.job("a").trainers) == (grown, 4)
        if grown == 3:
            assert not follow_resize(state, "a", live, grown, wanted, asked=False).answer
            for name in ("p0", "p1", "p2"):
                state.apply(PutAssignment(("pserver", name), Assignment(job="a", epoch=1)), 0.0)
            continue
        assert not follow_resize(state, "a", live, grown, set(), asked=False).answer, (
            "nobody has an index yet: nobody is let go"
        )
        drops = follow_resize(state, "a", live, grown, wanted, asked=False).changes
        assert set(drops) == {DropAssignment(("pserver", "p0")), DropAssignment(("pserver", "p2"))}


@pytest.mark.parametrize("before", [None, 5])
def test_a_resize_that_was_cancelled_leaves_no_cap_on_the_trainers(before: int | None) -> None:
    """A job of a cluster has what is idle, whatever its spec says of trainers. `before`: an earlier resize is
    in force."""
    job = active("a", trainers=before)
    state = state_of(job)
    live = job.spec.model_copy(update={"trainers": before or job.spec.trainers})
    for trainers, asked in ((1, True), (live.trainers, before is not None)):
        now = job.spec.model_copy(update={"trainers": trainers})
        for change in follow_resize(state, "a", now, 1, set(), asked=asked).changes:
            state.apply(change, 0.0)
        assert state.job("a").trainers == (1 if trainers == 1 else before)
    assert not follow_resize(state, "a", live, 1, set(), asked=before is not None).answer


def test_the_place_of_a_parameter_server_that_dies_before_its_slots_have_moved_is_kept() -> None:
    """It was taken back, and the job waited for ever for those slots."""
    job = job_of("a", pservers=2)
    state = ClusterState()
    state.apply(PutJob(job.model_copy(update={"standing": Standing.ACTIVE, "epoch": 1})), 0.0)
    for name in ("p0", "p1"):
        state.apply(PutAssignment(("pserver", name), Assignment(job="a", epoch=1)), 0.0)
    live = job.spec.model_copy(update={"pservers": 1})
    assert not follow_resize(state, "a", live, 2, {"p0"}, asked=False).answer
    for change in follow_resize(state, "a", live, 1, {"p0"}, asked=False).changes:
        state.apply(change, 0.0)
    assert follow_resize(state, "a", live, 1, {"p0", "p1"}, asked=False).events == (), (
        "nobody can be let go yet"
    )
    drops = follow_resize(state, "a", live, 1, {"p0"}, asked=False).changes
    assert drops == (DropAssignment(("pserver", "p1")),)


def test_how_far_a_job_was_stays_on_record_until_a_later_term_says_it_anew() -> None:
    first, later = Outcome(epoch=1, step=7, loss=0.5, records_done=25, records_total=100), Outcome(step=9)
    state = state_of(active("a"))
    for standing, told, kept in (
        (Standing.PAUSED, first, first),
        (Standing.QUEUED, None, first),  # that term never led it
        (Standing.FAILED, later, later),
    ):
        state.apply(PutJob(state.job("a").with_fields(standing=Standing.ACTIVE, wanted="run")), 0.0)
        wanted = "pause" if standing is Standing.PAUSED else "run"
        state.apply(PutJob(state.job("a").with_fields(wanted=wanted)), 0.0)
        (change,) = finish(state, "a", standing, "it stopped", STAMP, told).changes
        state.apply(change, 0.0)
        assert (state.job("a").standing, state.job("a").outcome) == (standing, kept)
    stored = ClusterJob.from_bytes(state.job("a").to_bytes())
    assert stored == state.job("a")
