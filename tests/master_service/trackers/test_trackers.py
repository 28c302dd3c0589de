"""Each tracker, killed in between and made anew: what it has is read back by the format's own reader, each
step once."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from master_service.trackers.made import check, make
from master_service.trackers.tracker import Point, Run, Tracker
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.job_choices import Tracker as Wanted

STEPS = 12
RESULT = {"phase": "COMPLETED", "reason": "done", "metrics": {"mse": 0.5}}


def point(step: int, name: str = "loss") -> Point:
    return Point(name, step, step, 1 / (step + 1), 0.0, 1.0, 4.0)


def run_in(folder: str | Path, kind: str, attempt: int = 1, **wanted: str) -> Run:
    place = files.join(str(folder), f"{kind}.json")

    def remember(document: object) -> None:
        files.write_bytes(place, json.dumps(document).encode())

    known = json.loads(files.read_bytes(place)) if files.exists(place) else {}
    parameters = {"epochs": "2", "lanes": "4"}
    return Run(
        "digits", "run-1", attempt, str(folder), parameters, Wanted(kind=kind, **wanted), known, remember
    )


def begun(folder: str | Path, kind: str, attempt: int = 1, **wanted: str) -> tuple[Tracker, dict[str, int]]:
    run = run_in(folder, kind, attempt, **wanted)
    tracker = make(run.wanted)
    return tracker, dict(tracker.begin(run) or {})


def log_with_a_death(folder: str | Path, kind: str, **wanted: str) -> None:
    """The first one is left as a process that was killed leaves it."""
    tracker, told = begun(folder, kind, **wanted)
    assert told == {}
    tracker.log([point(step) for step in range(7)])
    again, told = begun(folder, kind, 2, **wanted)
    assert told == {"loss": 7}
    again.log([*map(point, range(7, STEPS)), point(STEPS - 1, "evaluation.mse")])
    again.end(RESULT)


EXPECTED = [(step, pytest.approx(1 / (step + 1))) for step in range(STEPS)]


def test_csv_has_each_step_once(tmp_path: Path) -> None:
    log_with_a_death(tmp_path, "csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics" / "metrics.csv").read_text())))
    losses = [(int(row["step"]), float(row["mean"])) for row in rows if row["metric"] == "loss"]
    assert losses == [(step, 1 / (step + 1)) for step in range(STEPS)]  # all digits
    assert list(rows[0]) == ["metric", "step", "last_step", "mean", "least", "most", "weight"]
    assert rows[-1]["metric"] == "evaluation.mse"


@pytest.mark.parametrize("torn", [False, True])
def test_event_files_have_each_step_once(tmp_path: Path, torn: bool) -> None:
    folder = tmp_path / "tensorboard"
    if torn:
        tracker, _ = begun(tmp_path, "tensorboard")
        tracker.log([point(step) for step in range(8)])
        [file] = folder.iterdir()
        file.write_bytes(file.read_bytes()[:-5])  # step 7 is not there
        again, told = begun(tmp_path, "tensorboard", 2)
        assert told == {"loss": 7}
        again.log([point(step) for step in range(7, STEPS)])
        again.end(RESULT)
    else:
        log_with_a_death(tmp_path, "tensorboard")
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == EXPECTED
    settings, result = (
        reader.Tensors(f"trireme/{name}")[-1].tensor_proto.string_val[0] for name in ("settings", "result")
    )
    assert b"| epochs | 2 |" in settings
    assert b'"phase": "COMPLETED"' in result
    assert len(reader.Tensors("trireme/settings")) == 1
    assert [event.step for event in reader.Tensors("trireme/attempt")] == [1, 2]


def test_event_files_on_a_storage_without_folders_are_sent_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tempfile.tempdir", str(tmp_path)
    )  # the tracker that dies leaves its folder; a process of its own has none else
    folder = "memory://digits-of-trackers"
    log_with_a_death(folder, "tensorboard")
    names = files.names(f"{folder}/tensorboard")
    assert len(names) == 2
    assert all(name.startswith("events.out.tfevents") for name in names)
    tracker, told = begun(folder, "tensorboard", 3)
    assert told == {"loss": STEPS, "evaluation.mse": STEPS}
    tracker.close()


MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("digits")
[run] = client.search_runs([experiment.experiment_id])
steps = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
info, data = run.info, run.data
print(json.dumps([info.status, info.run_name, data.tags, data.params, sorted(data.metrics), steps]))
"""


def test_an_mlflow_run_goes_on_and_has_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back by MLflow's own client, in a process of its own."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path / 'store'}"
    log_with_a_death(tmp_path, "mlflow", uri=uri, experiment="digits", run="first")
    done = subprocess.run(
        [sys.executable, "-c", MLFLOW, uri], capture_output=True, text=True, check=True, timeout=60
    )
    status, name, tags, parameters, metrics, steps = json.loads(done.stdout)
    assert (status, name) == ("FINISHED", "first")
    assert (tags["trireme.job"], tags["trireme.attempt"], tags["trireme.phase"]) == (
        "digits",
        "2",
        "COMPLETED",
    )
    assert parameters == {"epochs": "2", "lanes": "4"}
    assert metrics == ["evaluation.mse", "loss"]
    assert [(step, pytest.approx(value)) for step, value in steps] == EXPECTED


def test_a_wandb_run_goes_on_offline_and_what_was_cut_off_is_sent_under_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own reader reads its own files; its service leaves out numbers that it has."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip("wandb")
    script = (
        "import sys; from pathlib import Path; from tests.master_service.trackers.test_trackers import *\n"
        "folder = Path(sys.argv[1])\n"
        "tracker, told = begun(folder, 'wandb', int(sys.argv[2]))\n"
        "told = told.get('loss', 0)\n"
        "tracker.log([point(step) for step in range(told, told + 6)])\n"
        "tracker.end(RESULT) if sys.argv[2] == '2' else os._exit(0)\n"
    )
    for attempt in ("1", "2"):
        arguments = [sys.executable, "-c", script, str(tmp_path), attempt]
        # wandb leaves folders in the temporary one
        own = {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path)}
        subprocess.run(arguments, check=True, timeout=60, env={**os.environ, **own})
    rows = [row for file in sorted((tmp_path / "wandb").rglob("*.wandb")) for row in wandb_rows(file)]
    by_number = {row["_step"]: (row["trireme_step"], row["loss"]) for row in rows}
    assert by_number == {step: (step, pytest.approx(1 / (step + 1))) for step in range(STEPS)}


def wandb_rows(file: Path) -> list[dict[str, float]]:
    """Its files are records in LevelDB's format for logs: blocks of 32 KiB, a header of 7 bytes before each
    part of a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts, rows = file.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while place + 7 < len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def test_a_missing_package_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    for kind in ("tensorboard", "mlflow", "wandb"):
        with pytest.raises(InvalidArgument) as refused:
            check([Wanted(kind=kind)])
        assert refused.value.hint == f"pip install 'trireme[{kind}]'"
    check([Wanted(kind="csv"), Wanted(kind="module:Name")])


def test_a_tracker_that_does_not_know_its_server_is_told_before_the_run() -> None:
    with pytest.raises(InvalidArgument, match="mlflow does not know its server"):
        check([Wanted(kind="mlflow")], {})
    check([Wanted(kind="mlflow")], {"MLFLOW_TRACKING_URI": "http://host"})
    with pytest.raises(InvalidArgument, match="the folder file:///runs, which MLflow refuses"):
        check([Wanted(kind="mlflow", uri="file:///runs")], {})
    check([Wanted(kind="mlflow")], {"MLFLOW_TRACKING_URI": "databricks"})
    check([Wanted(kind="mlflow", uri="file:///runs")], {"MLFLOW_ALLOW_FILE_STORE": "true"})
    check([Wanted(kind="wandb")], {"WANDB_MODE": "offline"})


def test_a_user_without_a_home_has_no_login_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(InvalidArgument, match="the tracker wandb has no key"):
        check([Wanted(kind="wandb")], {})


def test_an_own_tracker_needs_only_log(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def log(self, points):\n        self.points = points\n\nclass None_:\n    pass\n"
    )
    tracker = make(Wanted(kind="mine:Mine"), tmp_path)
    assert tracker.begin(run_in(tmp_path, "csv")) is None
    tracker.log([point(1)])
    tracker.end(RESULT)
    tracker.close()
    with pytest.raises(InvalidArgument, match="has no method log"):
        make(Wanted(kind="mine:None_"), tmp_path)
    with pytest.raises(InvalidArgument, match="the tracker absent:Mine cannot be imported"):
        make(Wanted(kind="absent:Mine"), tmp_path)
