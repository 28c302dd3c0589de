"""`trireme track`: a job that has ended is sent to trackers, whenever that is asked for, each step once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.trireme.cli.history.test_metrics import STEPS, data_dir, no_address  # noqa: F401  fixtures
from trireme.cli import exit_codes
from trireme.cli.history.trackers import track
from trireme.launch import resume

pytestmark = pytest.mark.processes


def losses(folder: Path) -> list[tuple[int, float]]:
    with (folder / "metrics" / "metrics.csv").open(newline="") as file:
        return [
            (int(row["step"]), float(row["mean"])) for row in csv.DictReader(file) if row["metric"] == "loss"
        ]


def test_an_ended_job_is_sent_to_a_tracker_that_it_did_not_have(
    data_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        assert track("digits", data_dir, None, ["csv"], 30.0) == exit_codes.OK
        assert capsys.readouterr().out == "csv: all of job digits is there\n"
        assert losses(data_dir / "digits") == [(number, 2.0 / 2**number) for number in range(STEPS)]


def test_what_cannot_be_tracked_is_told(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert track("digits", data_dir, None, [], 30.0) == exit_codes.USAGE
    assert "has no trackers" in capsys.readouterr().err
    assert track("digits", data_dir, None, ["cvs"], 30.0) == exit_codes.USAGE
    assert "there is no tracker 'cvs'" in capsys.readouterr().err
    assert track("digits", data_dir, None, ["absent_module:Tracker"], 30.0) == exit_codes.USAGE
    assert "absent_module:Tracker cannot be used" in capsys.readouterr().err
    (data_dir / "digits" / resume.RESULT_FILE).unlink()
    assert track("digits", data_dir, None, ["csv"], 30.0) == exit_codes.CONFLICT
    assert "has not ended" in capsys.readouterr().err
