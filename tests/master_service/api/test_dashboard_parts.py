"""What the dashboard computes, without a browser: smoothed curves, the range of a chart with outliers,
several jobs on one chart, settings that differ, and addresses of comparisons. Its own modules, in node."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from clients.tools import DASHBOARD, node, run

pytestmark = pytest.mark.timeout(300)  # the first time on a machine, pip fetches node


def computed(module: str, expression: str, **given: Any) -> Any:
    """The value of an expression over what a module of the dashboard exports, as `of`, and `given`."""
    code = (
        f"import * as of from {json.dumps((DASHBOARD / 'src' / module).as_uri())};"
        f"const given = {json.dumps(given)};"
        f"console.log(JSON.stringify({expression}));"
    )
    return json.loads(run([node(), "--input-type=module", "-e", code], DASHBOARD))


def points(values: list[float], width: int = 1) -> list[dict[str, float]]:
    return [
        {
            "step": place * width,
            "last_step": place * width + width - 1,
            "mean": value,
            "least": value,
            "most": value,
        }
        for place, value in enumerate(values)
    ]


def average(values: list[float], window: int) -> list[float]:
    """An exponential moving average whose weights add up to 1, from the definition."""
    decay = (window - 1) / (window + 1)
    found = []
    for end in range(1, len(values) + 1):
        weights = [decay ** (end - 1 - place) for place in range(end)]
        found.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    return found


def test_a_smoothed_curve_is_the_moving_average_over_the_steps_that_were_chosen() -> None:
    drawn = random.Random(1)
    values = [drawn.gauss(0, 1) + 10 for _ in range(200)]
    assert computed("curves.js", "of.smoothed(given.points, 0)", points=points(values)) == values
    for window in (2, 20, 500):
        found = computed("curves.js", f"of.smoothed(given.points, {window})", points=points(values))
        assert found == pytest.approx(average(values, window), rel=1e-9)
        assert found[0] == values[0], "it begins where the values do, not at 0"


def test_a_curve_of_few_points_is_as_smooth_as_that_of_all_steps() -> None:
    drawn = random.Random(2)
    means = [drawn.gauss(0, 1) for _ in range(50)]
    all_steps = [value for value in means for _ in range(8)]
    every = computed("curves.js", "of.smoothed(given.points, 20)", points=points(all_steps))
    coarse, fine = points(means, width=8)[:40], points(all_steps)[320:]  # the newest steps are single points
    few = computed("curves.js", "of.smoothed(given.points, 20)", points=coarse + fine)
    assert few == pytest.approx(every[7:320:8] + every[320:], rel=1e-9)


def test_the_windows_end_where_a_curve_would_be_flat() -> None:
    assert computed("curves.js", "of.windowsOf(100)") == [0, 2, 5, 10, 20]
    assert computed("curves.js", "of.windowsOf(0)") == [0, 2]


def robust(values: list[float]) -> Any:
    return computed("curves.js", "of.robustRange(given.values, given.values)", values=values)


def test_a_few_outliers_are_left_out_and_counted() -> None:
    values = [2.0 + math.sin(place) for place in range(500)]
    values[100], values[300] = 1e4, -50.0
    found = robust(values)
    assert found["outside"] == 2
    assert -3 < found["low"] < 1.0
    assert 3.0 < found["high"] < 5
    inside = [value for value in values if abs(value) < 40]
    assert found["low"] <= min(inside)
    assert max(inside) <= found["high"], "what is no outlier is shown"


def test_a_loss_that_falls_is_no_outlier_at_its_beginning() -> None:
    assert robust([7.0 * math.exp(-place / 60) + 2 for place in range(1000)]) is None
    assert robust([500 / (place + 100) for place in range(1000)]) is None


def test_the_only_value_that_differs_is_what_the_chart_is_for() -> None:
    assert robust([0.0] * 500 + [1.0]) is None
    assert robust([1.0, 2.0, 1e9]) is None, "too few to tell"


def test_several_jobs_share_one_column_of_steps() -> None:
    found = computed(
        "curves.js",
        "of.aligned([[[0, 2, 4], [1, 2, 3]], [[0, 3], [7, 8]]])"
        ".map((each) => each.map((value) => value ?? 'none'))",
    )
    assert found == [[0, 2, 3, 4], [1, 2, "none", 3], [7, "none", 8, "none"]]


ONE: dict[str, Any] = {
    "settings": {"epochs": 3, "seed": 1, "dataset": {"kind": "npy", "files": ["x", "y"]}, "keep_best": None},
    "script": "source:0123456789abcdef/train.py",
    "scheduling": {"priority": 50},
}


def test_the_settings_of_jobs_are_compared_line_by_line() -> None:
    settings = {**ONE["settings"], "seed": 2, "dataset": {"kind": "parquet", "files": ["x", "y"]}}
    other = {**ONE, "settings": settings, "script": "source:aaaaaaaaaaaaaaaa/train.py"}
    rows = computed("settings.js", "of.rowsOf([given.one, given.other])", one=ONE, other=other)
    assert [row["name"] for row in rows] == [
        "epochs", "seed", "dataset.kind", "dataset.files", "keep_best", "script", "scheduling.priority",
    ]  # fmt: skip
    differing = {row["name"]: row["values"] for row in rows if row["differs"]}
    assert differing == {
        "seed": [1, 2],
        "dataset.kind": ["npy", "parquet"],
        "script": ["01234567 train.py", "aaaaaaaa train.py"],
    }, "scripts of one name may be different ones"


def test_a_setting_is_told_from_its_default() -> None:
    defaults = {"epochs": 1, "seed": 1, "keep_best": None, "scheduling.priority": 50}
    names = ["epochs", "seed", "keep_best", "scheduling.priority", "script"]
    asked = "given.names.map((name) => of.isDefault(given.defaults, given.one, name) ?? 'none')"
    found = computed("settings.js", asked, names=names, defaults=defaults, one=ONE)
    assert found == [False, True, True, True, "none"]


def test_values_are_shown_as_people_write_them() -> None:
    shown = "[null, true, 1000000, 0.001, ['a', 'b'], [], [{x: 1}], '', 'y'.repeat(200)].map(of.shownAs)"
    found = computed("settings.js", shown)
    assert found[:-1] == ["\u2013", "yes", "1,000,000", "0.001", "a, b", "none", '[{"x":1}]', "empty"]
    assert found[-1] == f"{'y' * 160} … (200 characters)"


def test_the_address_of_a_comparison_names_each_job_once_and_ten_at_most() -> None:
    names = ["a", "b/c", "ä d", "a"]
    assert computed("compared.js", "of.namesOf(of.addressOf(given.names))", names=names) == [
        "a",
        "b/c",
        "ä d",
    ]
    many = [f"j{number}" for number in range(30)]
    assert computed("compared.js", "of.namesOf(of.addressOf(given.names))", names=many) == many[:10]
    assert computed("compared.js", "of.namesOf('#/jobs/a')") is None
