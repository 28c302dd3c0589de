"""What `trireme submit` sends: the job's settings, its script, and where its data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from master_service.api.routes import jobs
from tests.end_to_end.scripts import write_script
from trireme.cli import exit_codes
from trireme.cli.cluster.submit import SubmitRequest, request_body, schedule_of, scheduling_of
from trireme.cli.run import RunRequest, run_command
from trireme.preflight import Inspection
from trireme.settings import UsageError, from_flags, merge
from trireme_shared.protocol.records.cluster import Scheduling
from trireme_shared.protocol.rest_cluster import CreateJob, CreateSchedule

DATA = {"kind": "text_lines", "urls": ["train-*.txt", "s3://bucket/a.txt"]}


def sent(
    script: Path, inspection: Inspection, scheduling: Scheduling | None = None, **flags: Any
) -> CreateJob:
    """As the REST API reads it."""
    request = SubmitRequest(script, flags, storage=flags.pop("storage", None))
    body = request_body(request, merge([from_flags(flags)]), inspection, scheduling or Scheduling())
    return CreateJob.model_validate(body)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "My_Model.py"
    path.write_text("import beside\nx = 'ä'\n")
    (tmp_path / "beside.py").write_text("y = 1\n")
    return path


def test_the_script_goes_with_the_job_and_its_data_is_named_for_every_folder(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = sent(
        script, Inspection({"lanes": 4, "epochs": 3}, DATA, {**DATA, "urls": ["held-out.txt"]}), epochs=7
    )
    assert (asked.name, asked.script, asked.storage) == ("my-model", "", "")
    assert (asked.source.file_name, asked.source.text) == ("My_Model.py", "import beside\nx = 'ä'\n")
    assert asked.source.modules == {"beside.py": "y = 1\n"}
    assert asked.settings.dataset.urls == (str(tmp_path / "train-*.txt"), "s3://bucket/a.txt")
    assert asked.settings.evaluation_dataset.urls == (str(tmp_path / "held-out.txt"),)
    assert (asked.settings.lanes, asked.settings.epochs, asked.settings.pservers) == (4, 7, 1)


def test_what_a_reader_of_the_user_gets_stays_as_it_is_written(script):
    custom = {"kind": "custom", "urls": ["table:1", "parts/*.bin"], "reader": "my_model:reader"}
    urls = sent(script, Inspection({}, custom, None)).settings.dataset.urls
    assert (urls[0], urls[1]) == ("table:1", str(Path("parts/*.bin").absolute()))


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_module_of_a_reader_that_is_named_by_a_string_goes_with_the_job(script, evaluated):
    (script.parent / "readers").mkdir()
    for name in ("__init__", "lines"):
        (script.parent / "readers" / f"{name}.py").write_text("import words\n")
    (script.parent / "words.py").write_text("")
    custom = {"kind": "custom", "urls": ["table:1"], "reader": "readers.lines:reader"}
    inspection = Inspection({}, DATA, custom) if evaluated else Inspection({}, custom, None)
    modules = sent(script, inspection).source.modules
    assert sorted(modules) == ["beside.py", "readers/__init__.py", "readers/lines.py", "words.py"]


def test_settings_that_are_off_arrive_as_off(script):
    asked = sent(script, Inspection({}, DATA, None), checkpoint_every_epochs="off")
    assert asked.settings.checkpoint_every_epochs is None


def test_the_place_of_its_files_is_absolute(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sent(script, Inspection({}, DATA, None), storage="runs").storage == str(tmp_path / "runs")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"min_trainers": 3, "max_trainers": 2}, "max_trainers 2 is less than min_trainers 3"),
        ({"priority": 101}, "--priority = 101: input should be less than or equal to 100"),
        ({"not_before_time": "soon"}, "--not-before = 'soon'"),
    ],
)
def test_scheduling_that_cannot_be_is_told_by_its_flag(given, told):
    with pytest.raises(UsageError, match=told):
        scheduling_of(given)


def test_jobs_without_a_master_are_for_trireme_run(script):
    with pytest.raises(UsageError, match="dispatch etcd is for jobs without a master"):
        sent(script, Inspection({"dispatch": "etcd"}, DATA, None))


@pytest.mark.parametrize(
    ("given", "wait", "told"),
    [
        ({"time_zone": "Europe/Berlin"}, False, "--time-zone is for schedules: give --cron as well"),
        ({"cron": "0 6 * * *"}, True, "--wait is for one job"),
        ({"cron": "0 0 30 2 *"}, False, "--cron: '0 0 30 2 .*names a day that no month has"),
        ({"cron": "0 6 * * *", "concurrency": "both"}, False, "--concurrency both: give forbid or replace"),
    ],
)
def test_a_schedule_that_cannot_be_is_told_by_its_flag(script, given, wait, told):
    with pytest.raises(UsageError, match=told):
        schedule_of(SubmitRequest(script, {}, schedule=given, wait=wait))


def test_a_schedule_is_the_job_and_its_times(script):
    request = SubmitRequest(
        script, {}, schedule={"cron": "0 6 * * 1", "time_zone": "Europe/Berlin", "concurrency": None}
    )
    body = request_body(request, merge([from_flags({})]), Inspection({}, DATA, None), Scheduling(priority=7))
    asked = jobs.schedule_of(CreateSchedule.model_validate(body | schedule_of(request)), "s3://bucket/jobs")
    assert (asked.name, asked.cron, asked.time_zone, asked.concurrency) == (
        "my-model",
        "0 6 * * 1",
        "Europe/Berlin",
        "forbid",
    )
    assert (asked.spec.storage, asked.scheduling.priority) == ("s3://bucket/jobs", 7)
    assert asked.source_digest == asked.spec.script.split(":")[1].split("/")[0]


def test_without_cron_it_is_one_job(script):
    assert schedule_of(SubmitRequest(script, {}, schedule={"cron": None, "time_zone": None})) == {}


def test_functions_of_tasks_travel_with_the_script(script, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "publish.py").write_text("def main(): ...\n")
    asked = sent(
        script,
        Inspection({}, DATA, None),
        pre_tasks=["make data"],
        post_tasks=["tools.publish:main", "beside:y"],
    )
    assert [task.command for task in asked.settings.pre_tasks] == ["make data"]
    assert [task.function for task in asked.settings.post_tasks] == ["tools.publish:main", "beside:y"]
    assert sorted(asked.source.modules) == ["beside.py", "tools/publish.py"]


def test_trireme_run_has_no_members_for_tasks_and_says_what_has(tmp_path, capsys):
    flags = {"data_dir": str(tmp_path / "runs"), "pre_tasks": ["make data"], "global_batch_size": 8}
    assert run_command(RunRequest(write_script(tmp_path), flags)) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert "--pre-tasks: pre- and post-tasks run on members of a cluster" in told
    assert "trireme submit" in told
    assert not (tmp_path / "runs").exists()


def test_a_task_that_cannot_be_is_told_by_its_flag(script):
    with pytest.raises(UsageError, match=r"--pre-tasks = .*give either command"):
        sent(script, Inspection({}, DATA, None), pre_tasks=[" "])
