"""Charts in a terminal: where the dots lie, what the axes say, and that extreme values do no harm."""

from __future__ import annotations

import pytest

from trireme.view.chart import SMALL_ROWS, chart, last_chart, shows_braille, sparkline


def test_a_line_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = chart("loss", [(0, 4.0), (100, 0.0)], 40, rows=4, braille=False)
    assert lines[0] == "loss (last 0, lowest 0, highest 4)"
    assert [line[:3] for line in lines[1:5]] == ["4 +", "2 +", "  |", "0 +"]
    body = [line[3:] for line in lines[1:5]]
    begins = [row.index("*") for row in body]
    assert begins == sorted(begins)
    assert (begins[0], body[3].rindex("*")) == (0, 35)
    assert all(any(row[column : column + 1] == "*" for row in body) for column in range(36))  # no gap
    assert lines[-1].split() == ["0", "step", "100"]
    assert max(map(len, lines)) <= 40


def test_braille_dots_are_eight_in_a_character() -> None:
    rows = chart("x", [(0, 0.0), (1, 1.0)], 30, rows=2)[1:3]
    assert [row[:3] for row in rows] == ["1 ┤", "0 ┤"]
    assert ord(rows[1][3]) & 0x40  # the lowest dot on the left
    assert ord(rows[0][-1]) & 0x08  # the highest one on the right


@pytest.mark.parametrize(
    "values", [[1.0, 1.0], [0.0, 0.0], [1e308, -1e308], [5e-324, 0.0], [-3.0, -1e9], [1e16, 1e16 + 2]]
)
@pytest.mark.parametrize("braille", [True, False])
def test_values_of_any_size_are_drawn_within_the_width(values: list[float], braille: bool) -> None:
    lines = chart("x", list(enumerate(values)), 50, braille=braille)
    assert len(lines) == 12 + 3
    assert max(map(len, lines[1:])) <= 50


def test_one_point_is_no_chart() -> None:
    assert chart("evaluation.accuracy", [(191, 0.98)], 80) == ["evaluation.accuracy 0.98 at step 191"]


def test_a_sparkline_shows_the_means_of_parts() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([2.0] * 5, 32) == "▁▁▁▁▁"
    assert sparkline([0.05, 0.05000000000000001], 32) == "▁▁"  # the mean of equal values may be rounded
    assert sparkline([0.0, 1.0], 32, braille=False) == "_#"
    assert sparkline([], 32) == ""


def test_a_terminal_without_such_characters_is_known() -> None:
    assert shows_braille("utf-8")
    assert not any(map(shows_braille, ("ascii", "latin-1", None, "no such encoding")))


def test_after_the_end_what_is_not_finite_is_left_out_and_one_point_is_no_chart() -> None:
    drawn = last_chart("loss", [(0, 2.0), (1, float("nan")), (2, 1.0)], "utf-8").splitlines()
    assert drawn[0] == "loss (last 1, lowest 1, highest 2)"
    assert len(drawn) == SMALL_ROWS + 3
    assert last_chart("loss", [(0, 2.0), (1, float("inf"))], "utf-8") == ""
