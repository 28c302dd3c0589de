"""benchmarks.collective --parts kills: what it reads from what trainers told."""

from __future__ import annotations

import pytest

from benchmarks.collective.kills.report import percentile
from benchmarks.collective.kills.told import History

ALONE = ["a", "b", "c", "d", "e"]


def test_the_next_step_is_one_that_began_after_the_kill_and_ends_with_the_last_survivor():
    lines = {
        1: [(1.0, "a"), (2.0, "b"), (3.0, "c"), (4.0, "d")],
        2: [(1.1, "a"), (2.1, "b"), (3.1, "c"), (4.5, "d")],
    }
    history = History.of(lines, ALONE)
    # b to c was under way, c to d began after it
    assert history.next_step_s(2.05, [1, 2]) == pytest.approx(4.5 - 2.05)
    assert history.next_step_s(2.05, [1]) == pytest.approx(4.0 - 2.05)
    assert history.next_step_s(3.5, [1, 2]) is None
    assert history.next_step_s(2.05, [1, 3]) is None


def test_a_step_that_the_killed_one_had_begun_before_the_others_is_not_the_next_one():
    survivor, killed = [(2.0, "b"), (3.0, "c"), (4.0, "d"), (5.0, "e")], [(1.9, "b"), (2.4, "c")]
    assert History.of({1: survivor}, ALONE).next_step_s(2.5, [1]) == pytest.approx(4.0 - 2.5)
    assert History.of({1: survivor, 2: killed}, ALONE).next_step_s(2.5, [1]) == pytest.approx(5.0 - 2.5)


@pytest.mark.parametrize(
    "own",
    [
        [(1.0, "a"), (2.0, "b"), (3.0, "x")],
        [(1.0, "a"), (2.0, "c"), (3.0, "b")],
        [(1.0, "b"), (2.0, "a"), (3.0, "b")],
    ],
    ids=["bits of another version", "an older version", "a version twice"],
)
def test_a_survivor_with_another_version_is_wrong(own):
    lines = {1: [(1.0, "a"), (2.0, "b"), (3.0, "c")]}
    assert History.of(lines, ALONE).wrong(0.0, 9.0) == 0
    history = History.of({**lines, 2: own}, ALONE)
    assert history.wrong(0.0, 9.0) == 1
    assert history.wrong(0.0, 1.5) == 0


def test_a_trainer_may_lack_versions_that_it_did_not_compute_with():
    assert History.of({1: [(1.0, "a"), (2.0, "d")]}, ALONE).wrong(0.0, 9.0) == 0


def test_percentiles_are_values_that_were_measured():
    seconds = [float(number) for number in range(1, 101)]
    assert [percentile(seconds, share) for share in (50, 90, 99, 100)] == [50.0, 90.0, 99.0, 100.0]
