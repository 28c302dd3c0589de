"""When a dead child is started again."""

from __future__ import annotations

import signal

from trireme.launch.restarts import EARLY_S, MAX_DELAY_S, MAX_EARLY_ENDS, MAX_FAILED_STARTS, RestartPolicy


def test_a_child_that_ends_itself_at_once_again_and_again_is_given_up():
    policy = RestartPolicy()
    delays = [policy.delay_s(1, 0.5) for _ in range(MAX_EARLY_ENDS)]
    assert delays == [0.1, 0.2, 0.4, 0.8, None]


def test_a_child_that_is_killed_from_outside_is_started_again_for_ever():
    policy = RestartPolicy()
    delays = [policy.delay_s(-signal.SIGKILL, 0.5) for _ in range(50)]
    assert delays[-1] == MAX_DELAY_S


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
