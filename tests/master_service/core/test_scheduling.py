"""Who runs, with how many trainers, on which members, and what the others are told."""

from __future__ import annotations

import pytest

from master_service.core.state.cluster import DropAssignment, PutAssignment, PutJob
from tests.master_service.cluster import spec_of
from tests.master_service.core.cluster_jobs import (
    WALL,
    active,
    give,
    held_by,
    job_of,
    member_of,
    preempted,
    run_children,
    settle,
    split,
    state_of,
    step,
)
from trireme_shared.protocol.records.cluster import ClusterJob, Standing
from trireme_shared.protocol.records.job_choices import Mode, Strategy


def sync(name: str, lanes: int, **fields) -> ClusterJob:
    return job_of(
        name, spec=spec_of(job=name, mode=Mode.SYNC, lanes=lanes, global_batch_size=lanes), **fields
    )


# ---------------------------------------------------------------- start


def test_a_job_starts_with_all_it_needs_at_once():
    state = state_of(job_of("a", pservers=2, min_trainers=2, max_trainers=3), trainers=5, pservers=3)
    made = step(state)
    started = state.jobs["a"]
    assert (started.standing, started.epoch, started.reason) == (Standing.ACTIVE, 1, "")
    assert started.start_time == "2027-01-15T08:00:00.000+00:00"
    assert split(state, "a") == [(3, 2)]
    assert [event.message for event in made.events] == [
        "job a starts with 2 parameter servers and 3 trainers"
    ]
    kinds = [type(change) for change in made.changes]
    assert kinds == [PutJob] + [PutAssignment] * 5
    assert state.assignments[("trainer", "t0")].incarnation == "i-t0"


def collective(name: str, **fields) -> ClusterJob:
    spec = {
        "mode": Mode.SYNC,
        "strategy": Strategy.COLLECTIVE,
        "pservers": 0,
        "lanes": 4,
        "global_batch_size": 4,
    }
    return job_of(name, spec=spec_of(job=name, min_members=2, **spec), **fields)


def test_a_collective_job_starts_with_min_members_trainers_and_no_parameter_server():
    state = state_of(collective("a", max_trainers=3), trainers=4, pservers=2)
    made = step(state)
    assert split(state, "a") == [(3, 0)]
    assert [event.message for event in made.events] == ["job a starts with 3 trainers"]
    few = state_of(collective("a"), trainers=1, pservers=2)
    step(few)
    assert few.jobs["a"].reason == "needs 2 trainers; the pool has 1: more must join it"
    none = state_of(collective("a"), trainers=2)
    step(none)
    assert split(none, "a") == [(2, 0)]


def test_a_job_without_enough_members_gets_none_and_is_told_both_numbers():
    state = state_of(active("x", pservers=2, min_trainers=1), job_of("a", pservers=2), trainers=3, pservers=3)
    give(state, "x", "p0", "p1", "t0")
    step(state)
    assert state.jobs["a"].standing is Standing.QUEUED
    assert state.jobs["a"].reason == "waits for 2 parameter servers; 1 of 3 is free (job x has the others)"
    assert split(state, "x", "a") == [(3, 2), (0, 0)]


def test_least_numbers_of_trainers_that_others_keep_are_named():
    state = state_of(
        active("x", min_trainers=2),
        active("y", min_trainers=3),
        job_of("a", min_trainers=4),
        trainers=6,
        pservers=3,
    )
    give(state, "x", "p0", "t0", "t1")
    give(state, "y", "p1", "t2", "t3", "t4", "t5")
    step(state)
    assert (
        state.jobs["a"].reason
        == "waits for 4 trainers; 1 of 6 can be had (jobs x, y keep the others as the minimum)"
    )


def test_what_the_pool_does_not_have_holds_nobody_back():
    state = state_of(job_of("big", pservers=4), job_of("small"), trainers=2, pservers=3)
    step(state)
    assert state.jobs["big"].reason == "needs 4 parameter servers; the pool has 3: more must join it"
    assert state.jobs["small"].standing is Standing.ACTIVE


def test_a_job_that_waits_is_not_overtaken_until_it_starves():
    state = state_of(
        active("x", pservers=2), job_of("big", pservers=3), job_of("small"), trainers=4, pservers=3
    )
    give(state, "x", "p0", "p1", "t0")
    step(state)
    assert state.jobs["small"].standing is Standing.QUEUED
    assert state.jobs["small"].reason == (
        "waits for 1 parameter server behind job big, which comes first and waits for 3 parameter "
        "servers; 1 of 3 can be had"
    )


def test_a_preemptible_job_of_lower_priority_uses_what_waits_and_gives_it_back():
    state = state_of(
        active("x", pservers=2),
        job_of("big", pservers=3),
        job_of("small", priority=10, preemptible=True),
        trainers=4,
        pservers=3,
    )
    give(state, "x", "p0", "p1", "t0")
    settle(state)
    assert state.jobs["small"].standing is Standing.ACTIVE
    state.apply(PutJob(state.jobs["x"].model_copy(update={"standing": Standing.COMPLETED})), 1.0)
    step(state, 1.0)
    assert preempted(state) == ("small",)
    assert state.jobs["small"].preempted_by == "big"


def test_a_preemptible_job_passes_nobody_of_its_own_priority():
    """`equal` could not have back what `small` took, once `big` has what it waits for."""
    state = state_of(
        active("x", pservers=2),
        job_of("big", pservers=3),
        job_of("equal", priority=10),
        job_of("small", priority=10, preemptible=True),
        trainers=4,
        pservers=4,
    )
    give(state, "x", "p0", "p1", "t0")
    settle(state)
    assert [state.jobs[name].standing for name in ("big", "equal", "small")] == [Standing.QUEUED] * 3


@pytest.mark.parametrize("count", [25])
def test_only_the_first_that_wait_have_numbers_in_their_reasons(count):
    jobs = [job_of(f"j{number:02}", number + 1, pservers=1) for number in range(count)]
    state = state_of(active("x", pservers=1, number=1000), *jobs, trainers=1, pservers=1)
    give(state, "x", "p0", "t0")
    step(state)
    assert "0 of 1 is" not in state.jobs["j00"].reason
    assert state.jobs["j00"].reason == "waits for 1 parameter server; 0 of 1 are free (job x has the others)"
    assert state.jobs["j24"].reason == "waits behind more than 20 jobs that come first"


# ---------------------------------------------------------------- time and order


def test_a_job_with_a_time_waits_for_it():
    state = state_of(job_of("a", not_before_time="2027-01-15T08:00:10Z"), trainers=1, pservers=1)
    assert step(state).next_look_s == pytest.approx(10.0)
    assert state.jobs["a"].reason == "starts at 2027-01-15T08:00:10Z or later"
    step(state, 10.0, WALL + 10.0)
    assert state.jobs["a"].standing is Standing.ACTIVE


def test_a_job_starts_after_the_jobs_before_it_are_completed():
    state = state_of(active("a"), job_of("b", after=("a",)), trainers=2, pservers=2)
    give(state, "a", "p0", "t0")
    step(state)
    assert state.jobs["b"].reason == "waits for job a to be COMPLETED"
    state.apply(PutJob(state.jobs["a"].model_copy(update={"standing": Standing.COMPLETED})), 1.0)
    step(state, 1.0)
    assert state.jobs["b"].standing is Standing.ACTIVE


@pytest.mark.parametrize(
    ("end", "why"),
    [(Standing.FAILED, "is FAILED"), (Standing.CANCELLED, "is CANCELLED"), (None, "was deleted")],
)
def test_jobs_after_one_that_never_completes_are_cancelled_all_along_the_chain(end, why):
    before = [job_of("a", standing=end)] if end else []
    state = state_of(*before, job_of("b", after=("a",)), job_of("c", after=("b",)), trainers=2, pservers=2)
    made = step(state)
    assert [state.jobs[name].standing for name in "bc"] == [Standing.CANCELLED] * 2
    assert state.jobs["b"].reason == f"job a, which it comes after, {why}"
    assert state.jobs["c"].reason == "job b, which it comes after, is CANCELLED"
    assert state.jobs["c"].end_time
    assert [event.name for event in made.events] == ["job_cancelled"] * 2


def test_a_job_that_ran_before_does_not_wait_for_the_jobs_before_it_again():
    state = state_of(job_of("b", after=("a",), epoch=1), trainers=1, pservers=1)
    step(state)
    assert (state.jobs["b"].standing, state.jobs["b"].epoch) == (Standing.ACTIVE, 2)


# ---------------------------------------------------------------- shares


def test_three_jobs_with_priorities_share_six_trainers_and_three_parameter_servers():
    high = job_of("high", 3, priority=90, min_trainers=2, max_trainers=3)
    state = state_of(job_of("low", 1, priority=10), job_of("mid", 2, min_trainers=2), trainers=6, pservers=3)
    settle(state)
    assert split(state, "low", "mid") == [(1, 1), (5, 1)]
    state.apply(PutJob(high), 1.0)
    settle(state, 1.0)
    assert split(state, "low", "mid", "high") == [(1, 1), (2, 1), (3, 1)]
    state.apply(PutJob(state.jobs["high"].model_copy(update={"standing": Standing.COMPLETED})), 2.0)
    settle(state, 2.0)
    assert split(state, "low", "mid", "high") == [(1, 1), (5, 1), (0, 0)]


def test_weights_share_trainers_and_the_least_number_is_a_floor():
    state = state_of(
        job_of("a", weight=2.0),
        job_of("b", weight=1.0),
        job_of("c", weight=1.0, min_trainers=4),
        trainers=10,
        pservers=3,
    )
    settle(state)
    assert split(state, "a", "b", "c") == [(4, 1), (2, 1), (4, 1)]


def test_a_job_has_no_more_trainers_than_lanes_or_than_a_resize_allows():
    state = state_of(sync("a", 2), sync("b", 8), trainers=8, pservers=2)
    settle(state)
    assert split(state, "a", "b") == [(2, 1), (6, 1)]
    state.apply(PutJob(state.jobs["b"].model_copy(update={"trainers": 3})), 1.0)
    settle(state, 1.0)
    assert split(state, "a", "b") == [(2, 1), (3, 1)]


def test_a_place_moves_again_only_after_the_rebalance_time_if_no_job_starts_or_ends():
    state = state_of(active("a"), active("b"), trainers=4, pservers=2)
    give(state, "a", "p0", "t0", "t1", "t2", at=90.0)
    give(state, "b", "p1", "t3", at=90.0)
    made = step(state, 100.0)
    assert (made.changes, made.next_look_s) == ((), 20.0)
    step(state, 120.0)
    assert split(state, "a", "b") == [(2, 1), (1, 1)]
    run_children(state)
    step(state, 120.0)
    assert split(state, "a", "b") == [(2, 1), (2, 1)]


def test_a_job_below_its_minimum_gets_trainers_at_once():
    state = state_of(active("a", min_trainers=2), active("b", min_trainers=2), trainers=5, pservers=2)
    give(state, "a", "p0", "t0", "t1", "t2", at=99.0)
    give(state, "b", "p1", "t3", at=99.0)
    state.see(("trainer", "t4"), None, 99.0)
    step(state, 100.0)
    assert split(state, "a", "b") == [(2, 1), (1, 1)]


# ---------------------------------------------------------------- preemption


def test_a_job_of_higher_priority_takes_a_preemptible_one_and_waits_for_its_members():
    low = active("low", 1, priority=10, preemptible=True, min_trainers=2)
    state = state_of(low, job_of("high", 2, priority=90, min_trainers=2), trainers=2, pservers=1)
    give(state, "low", "p0", "t0", "t1")
    step(state)
    assert preempted(state) == ("low",)
    assert held_by(state, "low") == ["p0", "t0", "t1"]  # it writes a checkpoint first
    assert state.jobs["low"].reason == "gives its members to job high of priority 90; its own is 10"
    assert state.jobs["high"].reason == "waits for 1 parameter server; 0 of 1 can be had at once"
    stopped = {"standing": Standing.QUEUED, "preempted_by": ""}
    state.apply(PutJob(state.jobs["low"].model_copy(update=stopped)), 1.0)
    settle(state, 1.0)
    assert split(state, "low", "high") == [(0, 0), (2, 1)]


@pytest.mark.parametrize(("preemptible", "priority"), [(False, 90), (True, 10), (True, 5)])
def test_only_preemptible_jobs_of_lower_priority_are_taken(preemptible, priority):
    low = active("low", 1, priority=10, preemptible=preemptible)
    state = state_of(low, job_of("other", 2, priority=priority), trainers=1, pservers=1)
    give(state, "low", "p0", "t0")
    step(state)
    assert preempted(state) == ()


def test_nobody_is_preempted_if_it_does_not_suffice():
    low, equal = active("low", 1, priority=10, preemptible=True), active("equal", 2, preemptible=True)
    state = state_of(low, equal, job_of("other", 3, pservers=2), trainers=3, pservers=2)
    give(state, "low", "p0", "t0")
    give(state, "equal", "p1", "t1")
    step(state)
    assert preempted(state) == ()


def test_no_more_jobs_are_preempted_than_are_needed_and_the_lowest_and_latest_first():
    lows = [active(name, number, priority=10, preemptible=True) for number, name in enumerate("abc", 1)]
    state = state_of(*lows, job_of("high", 9, priority=90, pservers=2), trainers=4, pservers=3)
    for number, name in enumerate("abc"):
        give(state, name, f"p{number}", f"t{number}")
    step(state)
    assert preempted(state) == ("b", "c")


def test_members_on_their_way_count_so_nobody_is_preempted_twice_for_one_need():
    ending = active("ending", 1, wanted="pause")
    low = active("low", 2, priority=10, preemptible=True)
    state = state_of(ending, low, job_of("high", 9, priority=90), trainers=2, pservers=2)
    give(state, "ending", "p0", "t0")
    give(state, "low", "p1", "t1")
    step(state)
    assert preempted(state) == ()
    state.apply(PutJob(ending.model_copy(update={"standing": Standing.PAUSED})), 1.0)
    step(state, 1.0)
    assert preempted(state) == ()
    assert split(state, "ending", "low", "high") == [(0, 0), (1, 1), (0, 0)]
    run_children(state, 2.0)
    step(state, 2.0)
    assert preempted(state) == ()
    assert split(state, "low", "high") == [(1, 1), (1, 1)]


# ---------------------------------------------------------------- members


def test_a_place_is_not_given_to_another_job_before_its_process_has_ended():
    state = state_of(active("a"), job_of("b"), trainers=1, pservers=1)
    give(state, "a", "p0", "t0")
    state.apply(PutJob(state.jobs["a"].model_copy(update={"standing": Standing.CANCELLED})), 1.0)
    step(state, 1.0)
    assert split(state, "a", "b") == [(0, 0), (0, 0)]
    assert (
        state.jobs["b"].reason
        == "waits for 1 parameter server; 0 of 1 can be had at once; processes of job a end"
    )
    run_children(state, 2.0)
    step(state, 2.0)
    assert split(state, "b") == [(1, 1)]


def test_a_member_that_vanished_keeps_its_assignment_for_a_while():
    state = state_of(active("a"), trainers=1, pservers=2)
    give(state, "a", "p0", "t0")
    state.see(("pserver", "p0"), None, 100.0)
    made = step(state, 104.0)
    assert (made.changes, made.next_look_s) == ((), 6.0)
    made = step(state, 110.0)
    assert held_by(state, "a") == ["p1", "t0"]
    assert made.events[0].message == "pserver p0 leaves job a: it is gone for 10 s"


def test_a_lost_parameter_server_without_another_is_said():
    state = state_of(active("a", pservers=2), trainers=1, pservers=2)
    give(state, "a", "p0", "p1", "t0")
    state.see(("pserver", "p1"), None, 100.0)
    step(state, 110.0)
    assert state.jobs["a"].reason == "lacks 1 of 2 parameter servers; 0 of 1 in the pool are idle"
    state.see(("pserver", "p2"), member_of("pserver", "p2"), 111.0)
    step(state, 111.0)
    assert (held_by(state, "a"), state.jobs["a"].reason) == (["p0", "p2", "t0"], "")


@pytest.mark.parametrize(
    "fields",
    [{"draining": True}, {"trouble": "it ended with code 1"}, {"ended": True}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_member_that_is_of_no_use_is_replaced_and_not_used_again(fields):
    state = state_of(active("a"), trainers=1, pservers=2)
    give(state, "a", "p0", "t0")
    place = ("pserver", "p0")
    state.see(place, state.members[place].model_copy(update=fields), 1.0)
    step(state, 1.0)
    assert held_by(state, "a") == ["p1", "t0"]
    state.see(place, member_of("pserver", "p0", draining="draining" in fields), 2.0)  # its process has ended
    state.see(("pserver", "p1"), None, 2.0)
    step(state, 20.0)
    assert held_by(state, "a") == ["t0"]


def test_a_member_that_registers_anew_goes_on_with_its_job():
    state = state_of(active("a"), trainers=1, pservers=1)
    give(state, "a", "p0", "t0")
    state.see(("trainer", "t0"), member_of("trainer", "t0").model_copy(update={"incarnation": "again"}), 1.0)
    made = step(state, 1.0)
    assert [type(change) for change in made.changes] == [PutAssignment]
    assert state.assignments[("trainer", "t0")].incarnation == "again"


def test_assignments_of_jobs_that_are_deleted_or_of_an_older_epoch_are_dropped():
    state = state_of(active("a", epoch=2), trainers=3, pservers=2)
    give(state, "a", "p0", "t0")
    state.apply(PutJob(active("gone")), 0.0)
    give(state, "gone", "t1")
    del state.jobs["gone"]
    state.assignments[("trainer", "t0")] = state.assignments[("trainer", "t0")].model_copy(
        update={"epoch": 1}
    )
    drops = [change.place[1] for change in step(state).changes if isinstance(change, DropAssignment)]
    assert drops == ["t0", "t1"]


def test_parameter_servers_are_spread_over_hosts_and_trainers_kept_together():
    state = state_of(trainers=8, pservers=4, hosts=4)
    state.apply(PutJob(job_of("a", 1, pservers=4, max_trainers=2)), 0.0)
    step(state)
    hosts = {
        kind: {state.members[place].host for place in state.assigned_to("a", kind)}
        for kind in ("pserver", "trainer")
    }
    assert (len(hosts["pserver"]), len(hosts["trainer"])) == (4, 1)


def test_a_thousand_jobs_share_ten_thousand_members():
    jobs = [
        job_of(f"j{number}", number + 1, priority=10 * (number % 3), min_trainers=3) for number in range(1000)
    ]
    state = state_of(*jobs, trainers=9000, pservers=1000, hosts=1250)
    step(state)
    assert len(state.assignments) == 10_000
    members = list(zip(jobs, split(state, *(job.job for job in jobs)), strict=True))
    high = [trainers for job, (trainers, _) in members if job.scheduling.priority == 20]
    assert sum(high) == 9000 - 3 * 667
    assert {found for job, found in members if job.scheduling.priority < 20} == {(3, 1)}
    assert max(high) - min(high) <= 1


def test_of_two_equal_jobs_the_one_that_has_the_odd_trainer_keeps_it():
    state = state_of(active("a"), active("b"), trainers=3, pservers=2)
    give(state, "a", "p0", "t0")
    give(state, "b", "p1", "t1", "t2")
    assert step(state, 1000.0).changes == ()
