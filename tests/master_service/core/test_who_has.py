"""Who has the members of the pool that a job waits for, as a sentence."""

from __future__ import annotations

import pytest

from master_service.core.decisions.scheduling.schedule import who_has
from master_service.core.state.cluster import ClusterState, PutDrain
from tests.master_service.core.cluster_jobs import active, give, state_of
from trireme_shared.protocol.records.cluster import Drain


def pool_of(other_priority: int) -> ClusterState:
    state = state_of(active("a", trainers=3), active("b", priority=other_priority), trainers=3, pservers=1)
    give(state, "a", "t0")
    give(state, "b", "t1", "t2", "p0")
    return state


@pytest.mark.parametrize(
    ("priority", "of"),
    [
        (80, "a higher priority (80, here 50)"),
        (50, "the same priority"),
        (20, "a lower priority (20, here 50)"),
    ],
)
def test_a_job_that_was_resized_is_told_which_jobs_have_the_trainers(priority: int, of: str) -> None:
    assert who_has(pool_of(priority), "a", "trainer") == f"the pool has 3 trainers; job b of {of} has 2"


def test_a_pool_that_is_too_small_for_the_job_says_that_more_must_join() -> None:
    state = state_of(active("a", trainers=3), trainers=3)
    give(state, "a", "t0", "t1")
    state.apply(PutDrain(("trainer", "t2"), Drain()), 0.0)
    assert who_has(state, "a", "trainer") == "the pool has 3 trainers, 1 of them drained: more must join it"
    assert who_has(state, "a", "pserver") == "the pool has 0 parameter servers: more must join it"


def test_a_job_that_has_all_its_places_lacks_nothing_of_the_pool() -> None:
    state = pool_of(80)
    give(state, "a", "p0")
    assert who_has(state, "a", "pserver") == ""
    assert who_has(state, "b", "trainer") != "", "it could use more"
    assert who_has(state, "deleted", "trainer") == ""


def test_at_most_a_few_jobs_are_named() -> None:
    others = [active(f"b{number}", priority=60) for number in range(6)]
    state = state_of(active("a", trainers=3), *others, trainers=6)
    for number in range(6):
        give(state, f"b{number}", f"t{number}")
    named = [f"job b{number} of a higher priority (60, here 50) has 1" for number in range(4)]
    assert who_has(state, "a", "trainer") == "; ".join(
        ["the pool has 6 trainers", *named, "other jobs have 2"]
    )
