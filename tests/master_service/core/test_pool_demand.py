"""How many pool members the jobs of a cluster need."""

from __future__ import annotations

from master_service.core.decisions.scheduling.admission import needed
from tests.master_service.core.cluster_jobs import active, job_of, state_of
from trireme_shared.protocol.records.cluster import Standing

NOW = 1_700_000_000.0


def test_jobs_need_their_parameter_servers_and_their_least_number_of_trainers() -> None:
    state = state_of(active("a", pservers=2, min_trainers=3, max_trainers=9), job_of("b", min_trainers=2))
    assert needed(state, NOW) == {"pserver": 3, "trainer": 5}


def test_a_resize_counts_with_what_it_asked_for() -> None:
    state = state_of(active("a", min_trainers=1, trainers=6, pservers=1).model_copy(update={"pservers": 4}))
    assert needed(state, NOW) == {"pserver": 4, "trainer": 6}


def test_jobs_that_may_not_run_now_need_nothing() -> None:
    later = job_of("later", not_before_time="2100-01-01T00:00:00Z")
    paused = job_of("paused", standing=Standing.PAUSED)
    ended = job_of("ended", standing=Standing.COMPLETED)
    leaving = active("leaving", wanted="pause")
    waits = job_of("waits", after=("leaving",))
    assert needed(state_of(later, paused, ended, leaving, waits), NOW) == {"pserver": 0, "trainer": 0}
