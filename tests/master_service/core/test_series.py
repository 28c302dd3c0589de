"""Metrics by step: bounded, replaced by a later timeline, and down-sampled for reading."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from master_service.core.state import series as module
from master_service.core.state.series import MOST_BUCKETS, MOST_SERIES, Series, SeriesTable, Value, WholeSteps
from master_service.storage.series_files import add_encoded, encoded, name_of, to_read
from tests.equipment.replaced import replaced


def one(value: float, weight: float = 1.0) -> Value:
    return Value(value * weight, weight, value, value)


def filled(steps: int, timeline: int = 0) -> Series:
    series = Series()
    for step in range(steps):
        series.add(step, timeline, one(float(step)))
    return series


def means(
    series: Series, *asked: Any, timeline: int = 0, done: int | None = None
) -> list[tuple[int, int, float]]:
    return [(point.first, point.last, point.mean) for point in series.points(*asked, timeline, done)]


def test_shares_of_a_step_make_one_weighted_mean() -> None:
    series = Series()
    series.add(3, 0, one(1.0, 30))
    series.add(3, 0, one(4.0, 10))
    [point] = series.points(0, 100, 10, 0, None)
    assert (point.first, point.last, point.mean) == (3, 3, 1.75)
    assert (point.value.least, point.value.most, point.value.weight) == (1.0, 4.0, 40.0)


def test_a_step_that_is_trained_again_takes_the_place_of_what_it_was_before() -> None:
    series = filled(6)
    assert [step for step, _, _ in means(series, 0, 9, 10, timeline=2, done=4)] == [0, 1, 2, 3]
    series.add(4, 2, one(40.0))
    series.add(4, 2, one(42.0))
    series.add(4, 0, one(0.0))  # late
    assert means(series, 0, 9, 10, timeline=2, done=5) == [(k, k, float(k)) for k in range(4)] + [
        (4, 4, 41.0)
    ]


def test_any_number_of_steps_takes_bounded_memory_and_keeps_its_mean() -> None:
    with replaced(module, "MOST_BUCKETS", 64):
        series = filled(10_000)
        assert len(series) <= 64
        assert series.width == 256
        assert sum(bucket.value.weight for bucket in series) == 10_000
        assert means(series, 0, 10_000, 1) == [(0, 10_239, 4999.5)]
        assert [first for first, _, _ in means(series, 300, 600, 10)] == [256, 512]
    assert MOST_BUCKETS == 8192


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_points_share_steps_where_there_are_too_many(most: int) -> None:
    series = filled(100)
    points = series.points(10, 89, most, 0, None)
    assert len(points) <= most
    assert (points[0].first, points[-1].last) == (10, 89)
    assert sum(point.value.total for point in points) == sum(range(10, 90))
    assert all(before.last < after.first for before, after in pairwise(points))
    assert len(points) > most // 2 or most == 100


def test_steps_may_be_reported_in_any_order() -> None:
    rng, series = random.Random(3), Series()
    steps = list(range(500)) * 2
    rng.shuffle(steps)
    for step in steps:
        series.add(step, 0, one(float(step)))
    assert means(series, 0, 500, 500) == [(step, step, float(step)) for step in range(500)]


def test_there_is_a_place_for_a_bounded_number_of_metrics() -> None:
    table = SeriesTable()
    taken = [table.add(f"m{number}", 0, 0, one(1.0)) for number in range(MOST_SERIES + 2)]
    assert taken == [True] * MOST_SERIES + [False] * 2
    assert table.refused == {f"m{MOST_SERIES}", f"m{MOST_SERIES + 1}"}


def test_what_is_stored_is_what_is_read_also_with_wide_buckets() -> None:
    with replaced(module, "MOST_BUCKETS", 64):
        table = SeriesTable({"a": filled(1000), "b": filled(5, timeline=3)})
        read = SeriesTable()
        add_encoded(read, WholeSteps(), encoded(table), "file")
        assert {name: list(series) for name, series in read.by_name.items()} == {
            name: list(series) for name, series in table.by_name.items()
        }
        assert read.by_name["a"].width == table.by_name["a"].width > 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"series": 3}', b'{"series": {"a": {"width": 1, "buckets": [[1]]}}}', b"\xff"],
)
def test_a_damaged_file_is_left_out(content: bytes) -> None:
    table = SeriesTable()
    add_encoded(table, WholeSteps(), content, "file")
    assert not table.by_name


def test_files_are_read_from_the_last_one_that_holds_everything() -> None:
    written = [
        name_of(7, 1, everything=False),
        name_of(7, 2, everything=True),
        name_of(12, 1, everything=False),
    ]
    late = name_of(6, 9, everything=False)
    assert to_read(["x.tmp", *reversed(written), late]) == (written[1:], [late, written[0]])
    assert to_read([]) == ([], [])
