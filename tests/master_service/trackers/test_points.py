"""Which points a tracker gets: each once, when its value will not change any more."""

from __future__ import annotations

from master_service.core.state.series import MOST_BUCKETS, SeriesTable, Value
from master_service.trackers.tracker import behind, new_points, told_with


def one(number: float) -> Value:
    return Value(number, 1, number, number)


def told(
    table: SeriesTable, known: int, before: dict[str, int], *, over: bool = False
) -> list[tuple[str, int, float]]:
    return [
        (point.name, point.step, point.value) for point in new_points(table, known, before, 1000, over=over)
    ]


def test_whole_steps_are_told_at_once_measured_ones_when_there_is_a_later_one() -> None:
    table = SeriesTable()
    for step in range(3):
        table.add("loss", step, 0, one(step), ordered=True)
        table.add("time.push", step, 0, one(step))
    table.add("evaluation.mse", 2, 0, one(7))
    assert told(table, 3, {}) == [
        ("loss", 0, 0),
        ("time.push", 0, 0),
        ("loss", 1, 1),
        ("time.push", 1, 1),
        ("evaluation.mse", 2, 7),
        ("loss", 2, 2),
    ]
    assert told(table, 3, {"loss": 3, "time.push": 2, "evaluation.mse": 3}) == []
    assert told(table, 3, {"loss": 3, "time.push": 2, "evaluation.mse": 3}, over=True) == [
        ("time.push", 2, 2)
    ]
    assert behind(table, {"loss": 1}) == 2


def test_steps_that_are_trained_again_are_not_told_again() -> None:
    table, before = SeriesTable(), dict[str, int]()
    for step in range(10):
        table.add("loss", step, 0, one(step), ordered=True)
    before = told_with(before, new_points(table, 10, before, 1000, over=False))
    table.rewind(4, 10)
    assert told(table, 4, before) == []
    for step in range(4, 12):
        table.add("loss", step, 1, one(step), ordered=True)
    assert told(table, 12, before) == [("loss", 10, 10), ("loss", 11, 11)]


def test_a_bucket_of_a_long_series_is_told_when_it_is_full() -> None:
    table, before, seen = SeriesTable(), dict[str, int](), []
    for step in range(2 * MOST_BUCKETS + 101):
        table.add("loss", step, 0, one(step), ordered=True)
        if step % 1000 == 0:
            points = new_points(table, step + 1, before, 10_000, over=False)
            before, seen = told_with(before, points), seen + points
    seen += new_points(table, 2 * MOST_BUCKETS + 101, before, 10_000, over=True)
    steps = [step for point in seen for step in range(point.step, point.last_step + 1)]
    assert len(steps) == len(set(steps))  # no step twice
    # at most what shares a bucket with a step that was told before
    assert len(steps) >= 2 * MOST_BUCKETS + 101 - 3
    assert {point.last_step - point.step for point in seen} == {0, 1, 3}


def test_a_portion_has_the_first_steps_of_all_metrics() -> None:
    table = SeriesTable()
    for step in range(100):
        for name in ("loss", "lr"):
            table.add(name, step, 0, one(step), ordered=True)
    points = new_points(table, 100, {}, 10, over=False)
    assert [(point.name, point.step) for point in points] == [
        (name, step) for step in range(5) for name in ("loss", "lr")
    ]
    assert told_with({}, points) == {"loss": 5, "lr": 5}
