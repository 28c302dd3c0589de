"""Places whose host agent is gone: when their work goes to others, and when it is waited for."""

from __future__ import annotations

from master_service.core.decisions.scheduling.admission import lost_places
from master_service.core.state.cluster import DropAssignment, Place, PutJob
from tests.master_service.core.cluster_jobs import (
    active,
    give,
    held_by,
    job_of,
    member_of,
    run_children,
    split,
    state_of,
    step,
)
from trireme_shared.protocol.records.cluster import Standing

P0: Place = ("pserver", "p0")
T0: Place = ("trainer", "t0")


def test_a_member_that_vanished_with_its_process_is_replaced_at_once():
    state = state_of(active("a"), trainers=2, pservers=2)
    give(state, "a", "p0", "t0", "t1")
    state.see(P0, None, 100.0)
    made = step(state, 100.1, lost=(P0,))
    assert held_by(state, "a") == ["p1", "t0", "t1"]
    assert [event.message for event in made.events] == [
        "pserver p0 leaves job a: it is lost with its process; p1 replaces it"
    ]
    assert made.changes[0] == DropAssignment(P0), "it is taken from the one before the other gets it"


def test_only_the_place_whose_process_is_gone_too_is_lost():
    state = state_of(active("a", pservers=2), active("b"), trainers=2, pservers=3)
    give(state, "a", "p0", "p1", "t0")
    give(state, "b", "p2", "t1")
    for place in (P0, ("pserver", "p1"), ("pserver", "p2"), T0):
        state.see(place, None, 100.0)
    assert lost_places(state, {}) == frozenset(), "nobody knows"
    assert lost_places(state, {"a": {"p1"}}) == {P0, T0}
    assert lost_places(state, {"a": {"p0", "p1", "t0"}, "b": set()}) == {("pserver", "p2")}
    state.see(P0, member_of("pserver", "p0", running="a", epoch=1), 101.0)
    assert lost_places(state, {"a": set()}) == {("pserver", "p1"), T0}, "a member that is there is not lost"


def test_a_lost_place_that_nobody_can_replace_is_kept_for_its_process_to_come_back():
    state = state_of(active("a"), trainers=1, pservers=1)
    give(state, "a", "p0", "t0")
    state.see(P0, None, 100.0)
    made = step(state, 104.0, lost=(P0,))
    assert (held_by(state, "a"), made.next_look_s) == (["p0", "t0"], 6.0)
    assert state.jobs["a"].reason == "lacks 1 of 1 parameter server; 0 of 0 in the pool are idle"
    state.see(P0, member_of("pserver", "p0", running="a", epoch=1), 105.0)
    step(state, 105.0)
    assert (held_by(state, "a"), state.jobs["a"].reason) == (["p0", "t0"], "")
    state.see(P0, None, 110.0)
    assert step(state, 120.0, lost=(P0,)).events[0].message == "pserver p0 leaves job a: it is gone for 10 s"


def test_a_job_whose_only_trainer_is_lost_takes_one_that_another_job_has_above_its_minimum():
    state = state_of(active("a"), active("b"), trainers=3, pservers=2)
    give(state, "a", "p0", "t0", at=99.0)
    give(state, "b", "p1", "t1", "t2", at=99.0)
    state.see(T0, None, 100.0)
    step(state, 100.1)
    assert split(state, "b") == [(2, 1)]
    step(state, 100.2, lost=(T0,))
    assert split(state, "b") == [(1, 1)]
    run_children(state, 101.0)
    step(state, 101.0, lost=(T0,))
    assert split(state, "a", "b") == [(1, 1), (1, 1)]
    assert T0 not in state.assignments


def test_an_agent_that_comes_back_with_its_child_after_it_was_replaced_holds_nothing():
    """What it still runs ends before the place is given again."""
    state = state_of(active("a"), trainers=1, pservers=2)
    give(state, "a", "p0", "t0")
    state.see(P0, None, 100.0)
    step(state, 100.1, lost=(P0,))
    state.see(P0, member_of("pserver", "p0", running="a", epoch=1), 101.0)
    assert step(state, 101.0).changes == ()
    assert held_by(state, "a") == ["p1", "t0"]
    state.apply(PutJob(job_of("b", 2)), 102.0)
    step(state, 102.0)
    assert state.jobs["b"].standing is Standing.QUEUED
    run_children(state, 103.0)
    state.see(("trainer", "t1"), member_of("trainer", "t1"), 103.0)
    step(state, 103.0)
    assert held_by(state, "b") == ["p0", "t1"]
