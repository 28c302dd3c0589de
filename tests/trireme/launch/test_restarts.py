"""When a dead child is started again."""

from __future__ import annotations

import signal

from trireme.launch.leases import LostLease
from trireme.launch.processes import (
    EARLY_S,
    MAX_DELAY_S,
    MAX_EARLY_ENDS,
    MAX_FAILED_STARTS,
    SCRIPT_CHANGED,
    Exit,
    RestartPolicy,
    death_event,
)
from trireme.view.child_events import AS_ASKED
from trireme_shared.platform.runtime.begun import Left
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.tasks import BegunWork


def test_a_child_that_ends_itself_at_once_again_and_again_is_given_up():
    policy = RestartPolicy()
    delays = [policy.delay_s(1, 0.5) for _ in range(MAX_EARLY_ENDS)]
    assert delays == [0.1, 0.2, 0.4, 0.8, None]


def test_a_child_that_is_killed_from_outside_is_started_again_for_ever():
    policy = RestartPolicy()
    delays = [policy.delay_s(-signal.SIGKILL, 0.5) for _ in range(50)]
    assert delays[-1] == MAX_DELAY_S


def test_a_delay_stays_finite_however_often_a_child_has_died():
    """The 1,025th early death raised OverflowError, which ended the host agent with everybody's jobs."""
    policy = RestartPolicy()
    assert [policy.delay_s(-signal.SIGKILL, 0.5) for _ in range(3000)][1024:] == [MAX_DELAY_S] * 1976


def test_a_child_that_runs_out_of_memory_has_ended_by_itself():
    policy = RestartPolicy()
    end = Exit(7, -signal.SIGKILL, 0.5, "out of memory (limit 4 GiB, 3.9 GiB used)")
    delays = [policy.delay_after(end, was_ready=True, at_work=False) for _ in range(MAX_EARLY_ENDS)]
    assert delays[-1] is None
    assert delays[0] is not None
    # at a record it counts against that record's task
    policy = RestartPolicy()
    assert None not in [policy.delay_after(end, was_ready=True, at_work=True) for _ in range(50)]
    told = death_event("trainer-1", end, given_up=False)
    assert (told.child, told.cause) == ("trainer-1", "out of memory (limit 4 GiB, 3.9 GiB used)")


def test_a_long_life_clears_the_counts():
    policy = RestartPolicy()
    for _ in range(MAX_EARLY_ENDS * 3):
        assert policy.delay_s(1, EARLY_S) == 0.1


def test_a_child_that_was_never_ready_is_given_up_after_two_ends_of_its_own():
    policy = RestartPolicy()
    assert [policy.delay_s(1, 0.5, was_ready=False) for _ in range(MAX_FAILED_STARTS)] == [0.1, None]


def test_kills_from_outside_are_no_failed_starts():
    policy = RestartPolicy()
    assert None not in [policy.delay_s(-signal.SIGKILL, 0.5, was_ready=False) for _ in range(50)]


def test_a_child_that_had_started_up_and_loses_its_lease_is_started_again_for_ever():
    policy = RestartPolicy()
    assert None not in [policy.delay_s(LEASE_LOST, 7.0) for _ in range(50)]
    assert policy.delay_s(1, 7.0) == MAX_DELAY_S, "a failure of its own is the first one"


def test_a_child_that_never_started_up_is_given_up_whatever_its_exit_code():
    policy = RestartPolicy()
    assert [policy.delay_s(LEASE_LOST, 0.5, was_ready=False) for _ in range(MAX_FAILED_STARTS)] == [0.1, None]


def test_a_trainer_that_finds_an_edited_script_is_started_again_until_the_script_is_as_it_was():
    policy = RestartPolicy()
    assert None not in [policy.delay_s(SCRIPT_CHANGED, 12.0) for _ in range(50)]
    assert policy.delay_s(SCRIPT_CHANGED, 12.0) == MAX_DELAY_S
    assert [policy.delay_s(1, 0.5) for _ in range(MAX_EARLY_ENDS)][-1] is None, "other ends count as ever"


def test_a_death_says_whether_the_lease_was_lost_and_for_how_long_nobody_heard_of_it():
    told = [
        death_event("trainer-1", Exit(7, code, 9.0), str(lost or ""), given_up=False)
        for code, lost in (
            (LEASE_LOST, LostLease(9.2)),
            (-signal.SIGKILL, LostLease(9.2)),
            (-signal.SIGKILL, LostLease(66.4, worked=True)),
            (-signal.SIGKILL, None),
            (0, LostLease(5.0)),
        )
    ]
    assert [(event.what, event.cause) for event in told] == [
        ("lost_lease", "frozen or cut off for 9 s"),
        ("lost_lease", "frozen or cut off for 9 s"),
        ("lost_lease", "working without a lease for 66 s"),
        ("died", "SIGKILL"),
        ("left", AS_ASKED),
    ]


def test_a_member_that_left_as_asked_is_told_so_and_not_as_dead():
    left = death_event("trainer-0", Exit(7, 0, 9.0), given_up=False)
    kept_away = death_event("trainer-0", Exit(7, 0, 9.0), given_up=True)
    assert (left.what, left.end, kept_away.what, kept_away.end) == (
        "left",
        "left, as asked (pid 7)",
        "given_up",
        "left, as asked (pid 7)",
    )
    work = BegunWork("7", 0, 3, "train.csv", 512, 64).to_bytes()
    died = death_event("trainer-0", Exit(7, 0, 9.0), given_up=False, left=Left("trainer-0-1", (work,)))
    assert died.end.startswith("died (exit code 0 while it computed minibatch 3")


def test_a_job_says_which_deaths_are_followed_by_a_start_and_how_soon():
    spec = {"job": "j", "script": "s.py", "storage": "/data", "dataset": TextLines("t.txt")}
    patient = RestartPolicy.of(JobSpec(**spec, restart_policy="on_failure", restart_delay_s=2.5))
    assert [patient.starts_again(code) for code in (0, 1, LEASE_LOST, -signal.SIGKILL)] == [
        False,
        True,
        True,
        True,
    ]
    delays = [patient.delay_s(-signal.SIGKILL, 0.5) for _ in range(7)]
    # never sooner, and not sooner than the others either
    assert (delays[0], delays[-1]) == (2.5, MAX_DELAY_S)
    never, always = (
        RestartPolicy.of(JobSpec(**spec, restart_policy="never")),
        RestartPolicy.of(JobSpec(**spec)),
    )
    assert not never.starts_again(-signal.SIGKILL)
    assert always.starts_again(0)
    assert always.delay_s(1, 0.5) == 0.1


def test_an_end_in_the_middle_of_a_minibatch_is_no_failed_start():
    policy = RestartPolicy()
    assert None not in [policy.delay_s(-signal.SIGSEGV, 0.5, at_work=True) for _ in range(50)]
    assert policy.own_ends == 0


def test_a_death_says_at_what_the_process_was():
    work = BegunWork("7", 0, 3, "train.csv", 512, 64).to_bytes()
    event = death_event(
        "trainer-0", Exit(1, -11, 2.0), given_up=False, left=Left("trainer-0-1", (work, b"?"))
    )
    assert event.cause == "SIGSEGV while it computed minibatch 3 of task 7 (train.csv records 512-575)"
