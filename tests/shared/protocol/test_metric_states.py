"""States of metric objects are merged without a bit of difference in whatever order tasks end."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
from pydantic import ValidationError

from trireme_shared.protocol.errors import InvalidArgument, TooLarge
from trireme_shared.protocol.records import EvaluationSums
from trireme_shared.protocol.records.metric_states import Elements, MetricState, Reduction
from trireme_shared.protocol.records.queue import MAX_SUMS_BYTES

TASKS = 20


def elements(*numbers: float, reduction: Reduction = Reduction.SUM, dtype: str = "float32") -> Elements:
    return Elements(reduction=reduction, dtype=dtype, shape=(len(numbers),), numbers=numbers)


def state(*texts: str, **of: Elements) -> MetricState:
    return MetricState(elements=of, tensors={"kept": {0: texts}} if texts else {})


def reports(seed: int) -> list[MetricState]:
    drawn = random.Random(seed)
    return [
        state(
            f"text-{task}",
            f"more-{task}",
            sums=elements(*(drawn.choice([1e16, 1.0, -1e16, 1e-9, 0.1]) for _ in range(4))),
            counts=elements(*(drawn.randrange(9) for _ in range(3)), dtype="int64"),
            most=elements(drawn.random(), reduction=Reduction.MAX),
            least=elements(drawn.random(), reduction=Reduction.MIN),
        )
        for task in range(TASKS)
    ]


def evaluated(tasks: list[tuple[int, MetricState]]) -> MetricState:
    """As the master adds them up, each in etcd's bytes in between."""
    total = EvaluationSums()
    for number, one in tasks:
        total = EvaluationSums.from_bytes(total.plus({"metric": one}, number).to_bytes())
    found = total.sums["metric"]
    assert isinstance(found, MetricState)
    return found


def test_the_order_of_tasks_changes_no_bit_and_sums_are_exact():
    found = list(enumerate(reports(1)))
    in_order = evaluated(found)
    sums = [math.fsum(one.elements["sums"].numbers[place] for _, one in found) for place in range(4)]
    assert list(in_order.elements["sums"].numbers) == sums
    assert in_order.elements["counts"].numbers == tuple(
        sum(one.elements["counts"].numbers[place] for _, one in found) for place in range(3)
    )
    assert in_order.elements["most"].numbers[0] == max(one.elements["most"].numbers[0] for _, one in found)
    assert in_order.elements["least"].numbers[0] == min(one.elements["least"].numbers[0] for _, one in found)
    for seed in range(5):
        drawn = random.Random(seed).sample(found, len(found))
        other = evaluated(drawn)
        assert {name: one.numbers for name, one in other.elements.items()} == {
            name: one.numbers for name, one in in_order.elements.items()
        }
        assert other.tensors == in_order.tensors
    assert in_order.tensors["kept"][7] == ("text-7", "more-7")


def test_plain_addition_would_depend_on_the_order():
    numbers = [one.elements["sums"].numbers[0] for one in reports(1)]
    assert list(accumulate(numbers))[-1] != list(accumulate(reversed(numbers)))[-1]


def test_a_task_merges_its_minibatches_exactly_and_so_do_tasks_of_them():
    found = reports(2)
    halves = [found[0], found[10]]
    for one in found[1:10]:
        halves[0] = halves[0].plus(one)
    for one in found[11:]:
        halves[1] = halves[1].plus(one)
    both = evaluated(list(enumerate(halves)))
    assert both.elements["sums"].numbers == evaluated(list(enumerate(found))).elements["sums"].numbers
    assert both.tensors["kept"][0][:4] == ("text-0", "more-0", "text-1", "more-1")


def test_not_a_number_stays_whichever_side_it_is_on():
    for reduction in Reduction:
        nan, one = elements(math.nan, reduction=reduction), elements(1.0, reduction=reduction)
        assert math.isnan(nan.plus(one).numbers[0])
        assert math.isnan(one.plus(nan).numbers[0])


def test_states_that_do_not_fit_together_are_told_with_both():
    total = EvaluationSums().plus({"auc": state(counts=elements(1, 2, dtype="int64"))}, 0)
    other = state(counts=elements(1, 2, 3, dtype="int64"))
    told = r"the metric auc: its state counts is int64 of shape \(2,\) after one .* int64 of shape \(3,\)"
    with pytest.raises(InvalidArgument, match=told):
        total.plus({"auc": other}, 1)
    told = "the metric auc: it has the states counts after one minibatch, right after"
    with pytest.raises(InvalidArgument, match=told):
        total.plus({"auc": state(right=elements(1))}, 1)
    with pytest.raises(InvalidArgument, match="auc is a number in one minibatch"):
        total.plus({"auc": 1.0}, 1)
    with pytest.raises(InvalidArgument, match="auc is a number in one minibatch"):
        EvaluationSums().plus({"auc": 1.0}, 0).plus({"auc": other}, 1)


def test_a_report_whose_elements_do_not_fit_its_shape_is_none():
    with pytest.raises(ValidationError, match="has 4 elements, not 2"):
        Elements(reduction=Reduction.SUM, dtype="int64", shape=(2, 2), numbers=(1, 2))
    with pytest.raises(ValidationError, match="parts of the elements"):
        Elements(reduction=Reduction.SUM, dtype="int64", shape=(2,), numbers=(1, 2), parts={2: (1.0, 1e-30)})


def test_a_metric_that_keeps_every_record_is_refused_by_name_with_both_sizes_and_what_to_use():
    small = state(counts=elements(*range(100), dtype="int64"))
    total = EvaluationSums().plus({"f1": small, "auc": state("x" * 150_000)}, 0).bounded()
    with pytest.raises(TooLarge) as refused:
        total.plus({"f1": small, "auc": state("x" * 150_000)}, 1).bounded()
    told = refused.value.message
    assert told.startswith("the metric auc of the evaluation has 3000")
    assert "after 2 tasks" in told
    assert f"at most {MAX_SUMS_BYTES} bytes" in told
    assert "it keeps values of every record (kept)" in told
    assert "trireme.metrics.AUC" in refused.value.hint
    wide = state(counts=elements(*range(60_000), dtype="int64"))
    with pytest.raises(TooLarge, match="the metric wide") as refused:
        EvaluationSums().plus({"wide": wide}, 0).bounded()
    assert refused.value.hint == "give it fewer classes, bins or thresholds"
