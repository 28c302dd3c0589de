"""A schedule that takes several transactions: all of it is written and told once, and nothing that changed
meanwhile is undone."""

from __future__ import annotations

import pytest

from master_service.core.changes import Event
from master_service.core.decisions.scheduling.schedule import Portions, Schedule, schedule
from master_service.core.state.cluster import ClusterState, DropDrain, PutDrain, PutJob
from tests.equipment.replaced import replaced
from tests.master_service.core.cluster_jobs import WALL, active, give, job_of, state_of
from trireme_shared.protocol.records.cluster import Drain, Standing

JOBS = 10


def made_of(state: ClusterState) -> Schedule:
    return schedule(state, 0.0, WALL)


def written(state: ClusterState, portions: Portions) -> tuple[Event, ...]:
    """In place: the next portion."""
    decision = portions.next(state)
    for change in decision.changes:
        state.apply(change, 0.0)
    return decision.events


def waiting() -> ClusterState:
    return state_of(*(job_of(f"j{number}") for number in range(JOBS)), trainers=JOBS, pservers=JOBS)


@pytest.mark.parametrize("most", [1, 7, 10, 90])
def test_portions_lead_to_the_state_of_the_whole_schedule_and_tell_the_same_events(most: int) -> None:
    state, whole = waiting(), waiting()
    planned = made_of(state)
    assert len(planned.changes) == 3 * JOBS
    for change in planned.changes:
        whole.apply(change, 0.0)
    portions, told = Portions(state, planned, most, 1 << 20), []
    for _ in range(-(-3 * JOBS // most)):
        assert not portions.done
        told += written(state, portions)
    assert portions.done
    assert not portions.stale
    assert (state.jobs, state.assignments) == (whole.jobs, whole.assignments)
    assert told == list(planned.events)
    assert len(told) == JOBS


def test_a_portion_has_no_more_bytes_than_fit_and_always_one_change() -> None:
    state = waiting()
    bytes_of_a_job = len(state.jobs["j0"].to_bytes())
    portions = Portions(state, made_of(state), 90, 5 * bytes_of_a_job)
    assert 2 <= len(portions.next(state).changes) <= 5
    small = Portions(state, made_of(state), 90, 1)
    assert len(small.next(state).changes) == 1


def cancelled(state: ClusterState) -> None:
    state.apply(PutJob(state.jobs["j9"].model_copy(update={"standing": Standing.CANCELLED})), 0.0)


def drained(state: ClusterState) -> None:
    state.apply(PutDrain(("trainer", "t9"), Drain()), 0.0)


def left(state: ClusterState) -> None:
    state.see(("trainer", "t9"), None, 0.0)


def registered_anew(state: ClusterState) -> None:
    member = state.members["trainer", "t9"]
    state.see(("trainer", "t9"), member.model_copy(update={"incarnation": "another"}), 0.0)


@pytest.mark.parametrize("meanwhile", [cancelled, drained, left, registered_anew])
def test_what_changed_meanwhile_is_not_undone_and_the_rest_is_scheduled_anew(meanwhile) -> None:
    state = waiting()
    portions = Portions(state, made_of(state), 9, 1 << 20)
    told = [*written(state, portions)]
    meanwhile(state)
    while not portions.done:
        told += written(state, portions)
    assert portions.stale
    assert written(state, portions) == ()
    if meanwhile is cancelled:
        assert state.jobs["j9"].standing is Standing.CANCELLED
    else:
        assert ("trainer", "t9") not in state.assignments
    rest = made_of(state)
    told += rest.events
    started = [event.fields["job"] for event in told if event.name == "job_started"]
    assert sorted(started) == sorted({*started}), "each is told once"
    assert len(started) == JOBS - (meanwhile is cancelled)


def test_without_the_look_at_what_changed_a_cancelled_job_would_run() -> None:
    with replaced(Portions, "_is_as_planned", lambda *_: True), pytest.raises(AssertionError):
        test_what_changed_meanwhile_is_not_undone_and_the_rest_is_scheduled_anew(cancelled)


def test_a_place_that_is_taken_away_is_told_with_its_own_change() -> None:
    state = state_of(active("a", max_trainers=1), trainers=2, pservers=1)
    give(state, "a", "t0", "t1", "p0")
    planned = made_of(state)
    assert [[event.name for event in told] for told in planned.told] == [["member_unassigned"]]
    state.apply(DropDrain(("trainer", "t0")), 0.0)
    assert written(state, Portions(state, planned, 90, 1 << 20)) == planned.events
