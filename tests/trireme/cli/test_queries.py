"""`trireme status | tasks | members` of jobs that ended, and of several jobs in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from trireme.cli.queries import ask, show_members, show_status, show_tasks
from trireme.cli.targets import job_target
from trireme.launch import resume, run_folder
from trireme.view.report import Counts, result_document
from trireme_shared.protocol.errors import Conflict, PeerError
from trireme_shared.protocol.records import JobResult, JobSpec, JobState, Phase, Stage
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_choices import AcceptedChange
from trireme_shared.protocol.rest import JobProgress, JobView, MasterView, MemberCounts

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("TRIREME_URL", raising=False)


def ended(data_dir: Path, job: str, phase: Phase, time_s: int = 0) -> dict:
    """The files that a run leaves; nothing listens at its address."""
    folder = data_dir / job
    folder.mkdir(parents=True)
    spec = JobSpec(job=job, script="/s.py", storage="/d", dataset=TextLines("x"), epochs=300)
    lost = {
        "task_id": "6",
        "kind": "TRAIN",
        "epoch": 1,
        "file": "/x.npy",
        "first": 24,
        "count": 4,
        "failures": 3,
    }
    counts = Counts(
        {}, loss=0.5, steps=39, records=2_500, epochs=5, discarded=[{**lost, "cause": "ValueError: no"}]
    )
    result = JobResult(trained_records=15_000) if phase is Phase.COMPLETED else JobResult()
    state = JobState(phase=phase, reason="KeyError twice" if phase is Phase.FAILED else "", result=result)
    document = result_document(spec, state, counts, 1.0, folder)
    run_folder.write_json(folder / resume.RESULT_FILE, document)
    run_folder.write_json(folder / run_folder.RUN_FILE, {"job": job, "url": NOBODY, "etcd": NOBODY})
    os.utime(folder / run_folder.RUN_FILE, (time_s, time_s))
    return document


def test_the_status_of_a_failed_job_tells_what_was_trained_and_why_it_ended(tmp_path, capsys):
    ended(tmp_path, "digits", Phase.FAILED)
    assert ask(show_status, "digits", tmp_path, None, as_json=False) == 0
    out, err = capsys.readouterr()
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["job", "digits FAILED after 1.0 s (sync)"] in lines
    assert ["records", "2,500 in 5 of 300 epochs"] in lines
    assert ["reason", "KeyError twice"] in lines
    assert err == ""


def test_the_status_of_a_completed_job_is_its_result(tmp_path, capsys):
    document = ended(tmp_path, "digits", Phase.COMPLETED)
    assert ask(show_status, "digits", tmp_path, None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert (document["records"], document["epochs"], document["epochs_done"]) == (15_000, 300, 300)


def test_an_ended_job_has_no_members_and_only_discarded_tasks(tmp_path, capsys):
    document = ended(tmp_path, "digits", Phase.COMPLETED)
    assert ask(show_members, "digits", tmp_path, None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"members": []}
    assert ask(show_tasks, "digits", tmp_path, None, as_json=True) == 0
    tasks = json.loads(capsys.readouterr().out)
    assert tasks == {"summary": {"discarded": 1}, "tasks": document["discarded"]["list"]}
    assert ask(show_tasks, "digits", tmp_path, None, as_json=True, state="pending") == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == []
    assert ask(show_members, "digits", tmp_path, None, as_json=False) == 0
    assert capsys.readouterr().out == "job digits is COMPLETED: it has no members any more\n"


def test_a_checkpoint_of_an_ended_job_can_be_neither_made_nor_restored(tmp_path):
    ended(tmp_path, "digits", Phase.COMPLETED)
    with pytest.raises(Conflict, match="job digits is COMPLETED: nobody runs that could do this") as refused:
        job_target("digits", tmp_path, None)
    assert "trireme checkpoint list" in refused.value.hint


def test_a_job_that_was_stopped_is_told_from_one_that_does_not_answer(tmp_path):
    ended(tmp_path, "digits", Phase.COMPLETED)
    (tmp_path / "digits" / resume.RESULT_FILE).unlink()
    with pytest.raises(PeerError, match="job digits does not run now, and it is unfinished") as refused:
        job_target("digits", tmp_path, None)
    assert "resumes it" in refused.value.hint
    with run_folder.opened(tmp_path, "digits"):
        assert job_target("digits", tmp_path, None).address == NOBODY


def test_the_status_of_a_stopped_job_says_how_it_goes_on(tmp_path, capsys):
    ended(tmp_path, "digits", Phase.COMPLETED)
    (tmp_path / "digits" / resume.RESULT_FILE).unlink()
    assert ask(show_status, "digits", tmp_path, None, as_json=False) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("Job digits was stopped before its end: its launcher does not run.\n")
    assert "resumes it" in out
    assert ask(show_status, None, tmp_path, None, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job"], document["phase"]) == ("digits", "STOPPED")


def test_with_several_jobs_it_is_told_which_one_is_shown_and_what_others_there_are(tmp_path, capsys):
    for time_s, job in enumerate(("old", "older", "new")):
        ended(tmp_path, job, Phase.COMPLETED, time_s)
    assert ask(show_status, None, tmp_path, None, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["job"] == "new"
    assert (
        err == f"this is job new, the one started last; {tmp_path} also has old, older (choose one with "
        "--job NAME)\n"
    )


class Running:
    """A master that leads one job."""

    def __init__(self, *history: AcceptedChange) -> None:
        self._history = history

    async def get_job(self, name: str) -> JobView:
        spec = JobSpec(job=name, script="/s.py", storage="/d", dataset=TextLines("x"), epochs=4)
        return JobView(
            job=name,
            state="RUNNING",
            phase="RUNNING",
            reason="",
            mode=spec.mode,
            stage=Stage.TRAIN,
            progress=JobProgress(epoch=1, epochs=4, step=7, loss=0.5, records_done=25, records_total=100),
            members=MemberCounts(trainers=1, trainers_desired=1, pservers=1, pservers_desired=1),
            losses=Losses(),
            result=JobResult(),
            master=MasterView(master_id="master-0", url=NOBODY, term=1),
            settings=spec,
            history=self._history,
            script=spec.script,
            storage=spec.storage,
        )


async def test_the_status_of_a_running_job_has_the_changes_that_its_user_has_accepted(capsys):
    change = AcceptedChange(
        number=1, time="2027-01-15T08:00:00Z", text="optimizer betas [0.9, 0.999] -> [0.8, 0.99]"
    )
    console = Console(width=200)
    shown = await show_status(Running(change), "digits", console)  # type: ignore[arg-type]  all that it asks
    assert shown["history"] == [change.model_dump()]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"changed at 2027-01-15T08:00:00Z: {change.text}"
    await show_status(Running(), "digits", console)  # type: ignore[arg-type]
    assert "changed" not in capsys.readouterr().out
