"""What the leader remembers of places whose members come and go."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from master_service.core.explanation.explain import failing_places
from master_service.core.state.cluster import DropAssignment, PutAssignment, PutJob
from tests.master_service.core.cluster_jobs import active, give, member_of, state_of
from trireme_shared.protocol.records.cluster import Assignment, Scheduling
from trireme_shared.protocol.times import instant, rfc3339

T0 = ("trainer", "t0")


def test_an_assigned_place_is_gone_since_its_member_was_first_missed():
    state = state_of(active("a"), trainers=1)
    give(state, "a", "t0")
    state.see(T0, None, 5.0)
    state.see(T0, None, 7.0)
    assert state.gone_since == {T0: 5.0}
    state.see(T0, member_of("trainer", "t0"), 8.0)
    assert state.gone_since == {}


def test_a_new_leader_misses_members_from_when_it_read_their_assignments():
    state = state_of(active("a"))
    state.apply(PutAssignment(T0, Assignment(job="a", epoch=1)), 3.0)
    assert state.gone_since == {T0: 3.0}


def test_a_place_where_a_process_could_not_run_is_unfit_for_that_epoch_only():
    state = state_of(active("a"), trainers=1)
    give(state, "a", "t0")
    state.see(
        T0, member_of("trainer", "t0", running="a", epoch=1, trouble="it ended with 1, five times"), 1.0
    )
    assert not state.fits(T0, state.jobs["a"])
    state.see(T0, member_of("trainer", "t0"), 2.0)
    assert not state.fits(T0, state.jobs["a"])
    why = failing_places(state, state.jobs["a"])
    assert why is not None, "explained also when the leader has taken the place from the job"
    assert why.details[0].endswith("it ended with 1, five times")
    state.apply(PutJob(active("a", epoch=2)), 3.0)
    assert state.fits(T0, state.jobs["a"])
    assert failing_places(state, state.jobs["a"]) is None


def test_nothing_is_kept_of_a_place_without_member_and_assignment():
    state = state_of(active("a"), trainers=1)
    give(state, "a", "t0")
    state.see(T0, member_of("trainer", "t0", running="a", epoch=1, ended=True), 1.0)
    state.see(T0, None, 2.0)
    state.apply(DropAssignment(T0), 3.0)
    assert (state.members, state.moved, state.gone_since, state.unfit) == ({}, {}, {}, {})


def test_a_time_without_a_zone_is_refused():
    with pytest.raises(ValidationError, match="no time with a zone"):
        Scheduling(not_before_time="2027-01-31T06:00:00")
    assert rfc3339(instant("2027-01-31T06:00:00Z")) == "2027-01-31T06:00:00.000+00:00"
