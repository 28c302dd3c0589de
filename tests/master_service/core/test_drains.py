"""Drained members of the pool: they leave, get nothing, and stay so until that is taken back."""

from __future__ import annotations

import pytest

from master_service.core.decisions.cluster_jobs import drain, undrain
from master_service.core.state.cluster import ClusterState
from tests.master_service.core.cluster_jobs import (
    active,
    give,
    held_by,
    job_of,
    member_of,
    settle,
    split,
    state_of,
    step,
)
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.cluster import Standing


def decide(state: ClusterState, decision) -> None:
    for change in decision.changes:
        state.apply(change, 0.0)


def test_a_drained_member_leaves_its_job_which_gets_another_one():
    state = state_of(active("a", min_trainers=1, max_trainers=1), trainers=2, pservers=2)
    give(state, "a", "t0", "p0")
    decide(state, drain(state, "t0", "now"))
    decide(state, drain(state, "p0", "now"))
    made = step(state)
    assert sorted(event.message for event in made.events) == [
        "pserver p0 leaves job a: it is drained",
        "trainer t0 leaves job a: it is drained",
    ]
    assert held_by(state, "a") == ["p1", "t1"]
    settle(state)
    assert held_by(state, "a") == ["p1", "t1"]


def test_drained_members_are_nobodys_until_that_is_taken_back():
    state = state_of(job_of("a", min_trainers=2), trainers=2, pservers=1)
    decide(state, drain(state, "t1", "now"))
    settle(state)
    assert state.jobs["a"].reason == "needs 2 trainers; the pool has 1: more must join it"
    decide(state, undrain(state, "t1"))
    settle(state)
    assert split(state, "a") == [(2, 1)]


def test_a_drained_member_that_registers_anew_stays_drained():
    state = state_of(job_of("a"), trainers=1, pservers=1)
    decide(state, drain(state, "t0", "now"))
    state.see(("trainer", "t0"), None, 0.0)
    state.see(("trainer", "t0"), member_of("trainer", "t0").model_copy(update={"incarnation": "new"}), 1.0)
    settle(state)
    assert state.jobs["a"].standing is Standing.QUEUED
    assert drain(state, "t0", "later").changes == ()


def test_only_members_that_are_known_can_be_drained():
    with pytest.raises(NotFound, match="no member t9"):
        drain(state_of(trainers=1), "t9", "now")
