"""The owner of lane 0 tells each step until it is stored; what it does not have, parameter servers are asked
for."""

from __future__ import annotations

from tests.equipment.replaced import replaced
from trainer_agent.tasks import steps as step_times
from trainer_agent.tasks.steps import WholeSteps
from trireme_shared.protocol.records import MetricsTaken
from trireme_shared.protocol.records.step import StepResult


def result(step: int) -> StepResult:
    return StepResult(
        step=step, epoch=0, lr=(0.5,), loss_sum=2.0 * step, records=2, metrics={"a": (1.0, 2.0, 0.25, 0.75)}
    )


def told(steps: WholeSteps, most: int = 100) -> list[int]:
    return [share.step for share in steps.portion(most, 1000)]


def owner(*done: int) -> WholeSteps:
    steps = WholeSteps()
    for step in done:
        steps.add(result(step), step, 0)
    return steps


def test_steps_are_told_once_and_kept_until_they_are_stored() -> None:
    steps = owner(0, 1, 2)
    assert (steps.active, steps.waiting, told(steps, 2), steps.waiting, told(steps)) == (
        True,
        3,
        [0, 1],
        1,
        [2],
    )
    steps.heard(MetricsTaken(next=3, stored=1), 0)
    assert (told(steps), steps.stored) == ([], 1)
    steps.heard(MetricsTaken(next=1, stored=1), 0)  # another master, which lacks what was not stored
    assert told(steps) == [1, 2]
    [share] = owner(7).portion(1, 1000)
    assert (share.step, share.loss_sum, share.records, share.lr) == (7, 14.0, 2, (0.5,))
    assert share.metrics["a"].model_dump() == {"total": 1.0, "weight": 2.0, "least": 0.25, "most": 0.75}


def test_a_report_that_did_not_arrive_is_told_again() -> None:
    steps = owner(4, 5)
    shares = steps.portion(100, 1000)
    steps.untold(shares)
    assert told(steps) == [4, 5]


def test_steps_behind_a_missing_one_are_not_told_until_that_is_there() -> None:
    """Who told them in a loop, because the master did not take them, stopped everything else in its
    process."""
    steps = owner(7, 8)
    assert (told(steps), steps.tellable) == ([7, 8], False)
    steps.heard(MetricsTaken(next=0, stored=0), 0)
    assert (steps.missing_from, steps.waiting, steps.tellable) == (0, 2, False)
    steps.filled([result(step) for step in range(7)], 0)
    assert steps.tellable


def test_what_a_new_owner_lacks_is_filled_and_what_nobody_keeps_is_lost() -> None:
    steps = owner(10)
    steps.heard(MetricsTaken(next=7, stored=5), 0)
    assert steps.missing_from == 7
    steps.filled([result(step) for step in (7, 8, 9, 10, 11)], 7)  # 11 is not done here yet
    assert (steps.missing_from, steps.lost_before, told(steps)) == (None, None, [7, 8, 9, 10])
    steps.heard(MetricsTaken(next=3, stored=3), 0)
    steps.filled([result(9)], 3)
    assert (steps.lost_before, told(steps)) == (7, [7, 8, 9, 10])
    steps.heard(MetricsTaken(next=11, stored=3), 0)
    assert (steps.lost_before, steps.missing_from, steps.waiting) == (None, None, 0)


def test_a_step_without_a_result_is_asked_for() -> None:
    steps = owner(0)
    steps.add(None, 1, 0)
    steps.add(result(2), 2, 0)
    assert told(steps) == [0, 2]
    steps.heard(MetricsTaken(next=1), 0)
    assert steps.missing_from == 1
    steps.filled([], 1)
    assert (steps.lost_before, told(steps)) == (2, [2])


def test_another_timeline_begins_anew_and_answers_about_the_one_before_are_late() -> None:
    steps = owner(5, 6)
    steps.add(result(3), 3, 9)
    steps.heard(MetricsTaken(next=7, stored=7), 0)
    assert (told(steps), steps.stored) == ([3], 0)
    steps.reach(6, 9)
    steps.heard(MetricsTaken(next=4), 9)
    assert steps.missing_from == 4
    steps.clear()
    assert (steps.active, steps.waiting, steps.missing_from) == (False, 0, None)


def test_what_was_stored_before_a_roll_back_does_not_count_behind_it() -> None:
    """Else the first push to the timeline that begins makes parameter servers forget results that are stored
    nowhere yet."""
    steps = owner(5, 6)
    steps.heard(MetricsTaken(next=7, stored=7), 0)
    assert (steps.stored_in(0), steps.stored_in(9)) == (7, 0)
    steps.add(result(3), 3, 9)
    steps.heard(MetricsTaken(next=4, stored=2), 9)
    assert steps.stored_in(9) == 2


def test_the_buffer_is_bounded() -> None:
    with replaced(step_times, "MOST_STEPS", 4):
        steps = owner(*range(10))
    assert told(steps) == [6, 7, 8, 9]
