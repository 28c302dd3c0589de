"""`trireme list`."""

from __future__ import annotations

import json
import os

import pytest

from trireme.cli.queries import REASON_CHARACTERS, list_runs
from trireme.launch import resume, run_folder


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("TRIREME_DATA_DIR", raising=False)


def run_of(data_dir, job, time_s, result=None):
    with run_folder.opened(data_dir, job) as folder:
        run_folder.write_json(folder / run_folder.TIME_FILE, {"seconds": 12.5})
        if result:
            run_folder.write_json(folder / resume.RESULT_FILE, {"job": job, **result})
    for path in folder.iterdir():
        os.utime(path, (time_s + (path.name != "lock"), time_s + (path.name != "lock")))


def listed(data_dir, capsys):
    assert list_runs(data_dir, as_json=True) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_runs_are_listed_newest_first_with_their_state_times_and_result(tmp_path, capsys):
    run_of(
        tmp_path,
        "old",
        1_000_000,
        {"phase": "COMPLETED", "reason": "trained", "metrics": {"accuracy": 0.97222}},
    )
    run_of(
        tmp_path, "bad", 1_000_200, {"phase": "FAILED", "reason": "KeyError:\n" + "x" * 200, "metrics": {}}
    )
    run_of(tmp_path, "half", 1_000_100)
    run_of(tmp_path, "plain", 1_000_050, {"phase": "COMPLETED", "metrics": {}, "loss": 0.31})
    with run_folder.opened(tmp_path, "now"):
        runs = listed(tmp_path, capsys)
    assert [(run["job"], run["state"]) for run in runs] == [
        ("now", "RUNNING"),
        ("bad", "FAILED"),
        ("half", "STOPPED"),
        ("plain", "COMPLETED"),
        ("old", "COMPLETED"),
    ]
    now, bad, half, plain, old = runs
    assert (now["ended"], now["result"]) == (None, "")
    assert bad["result"] == f"KeyError: {'x' * (REASON_CHARACTERS - 10)}…"
    assert (half["ended"], half["seconds"]) == ("1970-01-12T13:48:21.000+00:00", 12.5)
    assert plain["result"] == "loss 0.31"
    assert (old["started"], old["result"]) == ("1970-01-12T13:46:40.000+00:00", "accuracy 0.9722")
    assert old["folder"] == str(tmp_path / "old")


def test_the_table_has_one_line_for_each_run(tmp_path, capsys):
    run_of(tmp_path, "digits", 1_000_000, {"phase": "COMPLETED", "metrics": {"accuracy": 0.5}})
    assert list_runs(tmp_path, as_json=False) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "state", "started", "ended", "result", "folder"]
    assert line.split()[:2] == ["digits", "COMPLETED"]


def test_a_folder_without_runs_says_so(tmp_path, capsys):
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "lock").touch()
    assert list_runs(tmp_path / "none", as_json=False) == 0
    assert "holds no run" in capsys.readouterr().err
    assert listed(tmp_path, capsys) == []
