"""Results of steps: the tree completes them, whoever pushed which node; a parameter server keeps the last of
them, bounded."""

from __future__ import annotations

import math
import random

import pytest

from tests.equipment.replaced import replaced
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.metrics import MOST_NAMES
from trireme_shared.protocol.records.step import (
    NodeResult,
    StepRecord,
    StepResult,
    joined,
    result_of,
    step_result,
)
from trireme_shared.serving.core import history
from trireme_shared.serving.core.history import History, Results


def lanes(count: int) -> dict[Interval, NodeResult]:
    rng = random.Random(3)
    found = {}
    for lane in range(count):
        value = rng.random() * 10 ** rng.randrange(-8, 8)
        metrics = {"a": (value, 1.0, value, value)} if lane % 3 else {}
        found[lane, lane + 1] = NodeResult(
            loss_sum=value / 3, records=lane, skipped=lane % 2, metrics=metrics
        )
    return found


def test_the_tree_gives_the_same_bits_whoever_adds_up_which_part() -> None:
    leaves = lanes(8)
    expected = result_of((0, 8), leaves)
    assert expected is not None
    for nodes in (
        [(0, 4), (4, 8)],
        [(0, 2), (2, 3), (3, 4), (4, 8)],
        [(0, 1), (1, 2), (2, 4), (4, 6), (6, 8)],
    ):
        parts = {node: found for node in nodes if (found := result_of(node, leaves)) is not None}
        assert result_of((0, 8), parts) == expected
    in_order = sum(leaf.loss_sum for leaf in leaves.values())
    assert in_order != expected.loss_sum
    assert in_order == pytest.approx(expected.loss_sum)
    assert (expected.records, expected.skipped) == (28, 4)
    del leaves[3, 4]
    assert result_of((0, 8), leaves) is None


def test_names_of_a_step_are_bounded_and_what_is_not_finite_is_left_out() -> None:
    one = NodeResult(
        loss_sum=math.nan, records=3, metrics={f"m{n:02}": (1.0, 1.0, 1.0, 1.0) for n in range(MOST_NAMES)}
    )
    both = joined(one, NodeResult(loss_sum=1.0, records=1, metrics={"a": (math.inf, 1.0, 1.0, 1.0)}))
    assert len(both.metrics) == MOST_NAMES
    assert "a" in both.metrics
    found = step_result(both, 4, 1, (0.5,))
    assert (found.loss_sum, found.records, found.step, found.epoch, found.lr) == (0.0, 0, 4, 1, (0.5,))
    assert len(found.metrics) == MOST_NAMES - 1


def result(step: int, values: int = 1) -> StepResult:
    return StepResult(step=step, epoch=0, metrics={f"m{n}": (1.0, 1.0, 1.0, 1.0) for n in range(values)})


def steps_of(found: tuple[StepResult, ...]) -> list[int]:
    return [each.step for each in found]


def test_results_are_kept_until_they_are_stored_and_bounded() -> None:
    kept = Results(result(step) for step in range(6))
    kept.add(result(3))
    kept.forget(2)
    assert (steps_of(kept.of(0)), steps_of(kept.of(3, 5)), len(kept)) == ([2, 3, 4, 5], [3, 4], 4)
    with replaced(history, "MOST_RESULTS", 3), replaced(history, "MOST_VALUES", 8):
        kept.add(result(6))
        assert steps_of(kept.of(0)) == [4, 5, 6]
        kept.add(result(7, values=7))
        assert steps_of(kept.of(0)) == [6, 7]


def test_an_answer_takes_some_of_them() -> None:
    kept = Results(result(step, values=3) for step in range(9))
    with replaced(history, "RESULTS_AT_ONCE", 4):
        assert steps_of(kept.portion(2)) == [2, 3, 4, 5]
    with replaced(history, "VALUES_AT_ONCE", 7):
        assert steps_of(kept.portion(2)) == [2, 3]
    with replaced(history, "VALUES_AT_ONCE", 1):
        assert steps_of(kept.portion(2)) == [2], "one is always taken"


def test_a_checkpoint_carries_what_may_not_be_stored_and_who_loads_it_goes_on_from_there() -> None:
    own = History(StepRecord(version=3, positions=(), result=result(2), results=(result(0), result(1))))
    record = own.record(3)
    assert record is not None
    assert record.results == ()
    own.results.forget(1)
    saved = own.saved(record)
    assert (steps_of(saved.results), saved.result) == ([1], result(2))
    assert steps_of(History(saved).results.of(0)) == [1, 2]
    other = History(StepRecord(version=4, positions=()))
    other.results.add(result(3))
    other.take(own.handed())
    assert steps_of(other.results.of(0)) == [1, 2, 3]
