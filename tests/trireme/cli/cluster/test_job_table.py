"""`trireme jobs`: the table fits the terminal, and a pipe gets whole lines."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from trireme.cli.cluster.job_table import COLUMNS, Row, duration, row_of, table
from trireme_shared.protocol.times import instant, rfc3339

BEGAN = instant("2027-01-31T06:00:00Z")
NOW = BEGAN + 3_600 + 12 * 60
WHY = "waits for 2 trainers: 1 of 4 places is drained, and job nightly-embeddings-of-all-users has the others"


def job(name: str, state: str = "RUNNING", **values: Any) -> dict[str, Any]:
    """As listJobs gives it."""
    runs = state == "RUNNING"
    return {
        "job": name,
        "state": state,
        "standing": "ACTIVE" if runs else state,
        "wanted": "run",
        "reason": "",
        "progress": {
            "epoch": 13,
            "epochs": 300,
            "step": 326 if runs else None,
            "loss": 0.045243 if runs else None,
            "records_done": 5 if runs else 0,
            "records_total": 100 if runs else 0,
            "records_per_s": 538.0 if runs else None,
            "eta_s": 766.0 if runs else None,
        },
        "metrics": {},
        "members": {"trainers": 1, "trainers_desired": 2, "pservers": 1, "pservers_desired": 1},
        "create_time": rfc3339(BEGAN - 60),
        "start_time": rfc3339(BEGAN) if state != "QUEUED" else "",
        "end_time": "",
    } | values


def rows(*jobs: dict[str, Any]) -> list[Row]:
    return [row_of(each, NOW) for each in jobs]


RUNNING = job("digits", metrics={"accuracy": 0.97221, "f1": 0.5})
WAITING = job("nightly", "QUEUED", reason=WHY)
ENDED = job(
    "an-experiment-with-a-long-name-of-forty-five-ch",
    "COMPLETED",
    reason="trained, evaluated and exported",
    metrics={"accuracy": 0.5},
    end_time=rfc3339(BEGAN + 90),
)
ALL = rows(RUNNING, WAITING, ENDED)


def test_a_row_has_state_progress_loss_metric_and_time():
    assert ALL[0] == {
        "job": "digits",
        "state": "running",
        "done": "5%",
        "loss": "0.04524",
        "metric": "accuracy=0.9722",
        "time": "1h12m",
        "trainers": "1/2",
        "pservers": "1/1",
        "doing": "epoch 14/300  step 326  538 records/s  ETA 12:46",
    }
    unknown = dict.fromkeys(("done", "loss", "metric", "trainers", "pservers"), "-")
    assert ALL[1] == unknown | {"job": "nightly", "state": "queued", "time": "1h13m", "doing": WHY}
    assert (ALL[2]["metric"], ALL[2]["time"], ALL[2]["doing"]) == (
        "accuracy=0.5",
        "1m",
        "trained, evaluated and exported",
    )


@pytest.mark.parametrize("width", [*range(45, 200), 1000])
def test_no_line_is_wider_than_the_terminal_and_what_was_cut_says_so(width):
    lines = table(ALL, width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == 4
    for row, line in zip(ALL, lines[1:], strict=True):
        assert line.split()[1] == row["state"], "states are never cut"
        assert row["doing"] in line or line.endswith("…")


def test_at_eighty_columns_are_state_progress_loss_metric_and_time():
    assert table(rows(RUNNING, WAITING), 80) == [
        "job      state    done  loss     metric           time   doing",
        "digits   running  5%    0.04524  accuracy=0.9722  1h12m  epoch 14/300  step 326…",
        "nightly  queued   -     -        -                1h13m  waits for 2 trainers:…",
    ]


def test_members_are_shown_where_there_is_room_and_names_are_cut_last():
    assert table(ALL, 150)[0].split() == [*COLUMNS]
    narrow = table(ALL, 80)
    assert narrow[0].split() == [name for name in COLUMNS if name not in ("trainers", "pservers")]
    assert narrow[3].startswith("an-experiment…  completed")
    assert ALL[2]["job"] in table(ALL, 120)[3]


def test_whole_lines_have_every_column_of_every_job_whatever_the_others_are():
    lines = table(ALL)
    assert all(row["doing"] in line for row, line in zip(ALL, lines[1:], strict=True))
    alone = table(rows(WAITING))
    assert (alone[0].split(), alone[1].split()[:8]) == ([*COLUMNS], lines[2].split()[:8])
    assert table([]) == ["  ".join(COLUMNS)]


def test_a_terminal_without_unicode_gets_dots():
    assert table(rows(WAITING), 80, "...")[1].endswith("  waits for 2 trainers: 1...")


def test_a_reason_of_several_lines_stays_one_and_commands_no_terminal():
    (row,) = rows(job("a", "FAILED", reason="ValueError: \x1b[2Jno\nsecond line", end_time=rfc3339(NOW)))
    assert row["doing"] == "ValueError:  [2Jno second line"
    assert len(table([row], 80)) == 2


def test_wide_characters_count_as_two_cells():
    (row,) = rows(job("a", "QUEUED", reason="等待" * 50))
    assert cell_len(table([row], 80)[1]) <= 80


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h0m"),
        (86_399, "23h59m"),
        (183_600, "2d3h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_a_clock_that_is_behind_the_leaders_shows_no_negative_time_and_a_text_that_is_none_shows_nothing():
    assert row_of(RUNNING, BEGAN - 5)["time"] == "0s"
    assert row_of(job("a", start_time="soon"), NOW)["time"] == "-"
    paused = job("a", "PAUSED", reason="paused by its user")
    assert row_of(paused, NOW)["time"] == "1h13m", "since it was submitted"
