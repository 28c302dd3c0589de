"""`trireme explain` where no master answers: from the run's files, or from etcd."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.equipment.etcd.real import embedded_etcd
from trireme.cli.explain import explain
from trireme.launch import resume, run_folder
from trireme.view.child_events import ChildEvent, EventFile
from trireme.view.report import Counts, result_document
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd, free_ports
from trireme_shared.protocol.explanations import Code
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import FailureCause, JobSpec, JobState, MasterAddress, Phase, UserFailure
from trireme_shared.protocol.records.datasets import TextLines

__all__ = ["embedded_etcd"]

KEYS = Keys("digits")
DOCUMENT = Path(__file__).parents[3] / "docs" / "explain.md"


def nobody() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIREME_URL", "TRIREME_ETCD", "TRIREME_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def spec_of(folder: Path) -> JobSpec:
    return JobSpec(job="digits", script="/my script.py", storage=str(folder), dataset=TextLines("x"))


def a_run(data_dir: Path, etcd: str = "", url: str = "") -> Path:
    """The files of a run that a master has led."""
    folder = data_dir / "digits"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_bytes(spec_of(folder).to_bytes())
    facts = {"job": "digits", "url": url or nobody(), "etcd": etcd or nobody()}
    run_folder.write_json(folder / run_folder.RUN_FILE, facts)
    return folder


@contextmanager
def running(data_dir: Path) -> Iterator[None]:
    with run_folder.opened(data_dir, "digits"):
        yield


def told(capsys: pytest.CaptureFixture[str], data_dir: Path, **asked: str) -> dict:
    assert explain(asked.get("job"), data_dir, asked.get("url"), as_json=True) == 0
    document: dict = json.loads(capsys.readouterr().out)
    assert document["code"] in list(Code)
    assert document["hints"]
    return document


def end(folder: Path, state: JobState, *, resumable: bool = False) -> None:
    document = result_document(spec_of(folder), state, Counts({}), 1.0, folder, resumable=resumable)
    run_folder.write_json(folder / resume.RESULT_FILE, document)


def test_a_completed_job_by_its_files(tmp_path, capsys):
    end(a_run(tmp_path), JobState(phase=Phase.COMPLETED))
    assert told(capsys, tmp_path)["code"] == "JOB_COMPLETED"


@pytest.mark.parametrize("resumable", [True, False])
def test_a_failed_job_by_its_files_says_whether_it_can_be_resumed(tmp_path, capsys, resumable):
    failure = UserFailure(error_type="KeyError", message="'pixels'", task="task 7")
    cause = FailureCause.STORAGE if resumable else FailureCause.SCRIPT
    end(
        a_run(tmp_path),
        JobState(phase=Phase.FAILED, reason="it broke", failure=failure, cause=cause),
        resumable=resumable,
    )
    document = told(capsys, tmp_path)
    assert (document["code"], document["summary"]) == ("JOB_FAILED", "Job digits has failed: it broke")
    assert f"The cause is {cause}." in document["details"]
    assert "The error in task 7: KeyError: 'pixels'" in document["details"]
    assert ("It is resumable" in " ".join(document["details"])) is resumable


def test_a_stopped_job_tells_from_where_it_resumes_and_how_its_processes_ended(tmp_path, capsys):
    folder = a_run(tmp_path)
    EventFile(folder).append(ChildEvent("trainer-1", "died", "SIGKILL", 7))
    document = told(capsys, tmp_path, job="digits")
    assert document["code"] == "JOB_STOPPED"
    assert f"It has no checkpoint in {folder} yet" in document["details"][0]
    assert "trainer-1 ended at" in document["details"][1]
    assert document["hints"][0].startswith("trireme run '/my script.py'")


def test_no_run_at_all_is_not_found(tmp_path, capsys):
    assert explain("digits", tmp_path, None, as_json=False) == 3
    assert "holds no run of job digits" in capsys.readouterr().err


def test_an_etcd_that_nobody_reaches(tmp_path, capsys):
    folder = a_run(tmp_path)
    EventFile(folder).append(ChildEvent("etcd", "died", "exit code 1", 7))
    with running(tmp_path):
        document = told(capsys, tmp_path)
    assert document["code"] == "ETCD_UNREACHABLE"
    assert "cannot connect to etcd" in document["details"][0]
    assert "etcd ended at" in document["details"][1]


def test_an_address_at_which_nobody_answers(tmp_path, capsys):
    url = nobody()
    document = told(capsys, tmp_path, url=url)
    assert (document["code"], document["summary"]) == (
        "MASTER_SILENT",
        f"The master at {url} does not answer.",
    )


def test_a_run_that_no_master_has_led_yet_tells_how_its_masters_ended(tmp_path, capsys):
    (tmp_path / "digits").mkdir()
    EventFile(tmp_path / "digits").append(ChildEvent("master-0", "died", "exit code 2", 7))
    with running(tmp_path):
        document = told(capsys, tmp_path)
    assert document["code"] == "NO_MASTER"
    assert "exit code 2" in " ".join(document["details"])


@pytest.fixture
async def etcd(embedded_etcd: EmbeddedEtcd) -> AsyncIterator[EmbeddedEtcd]:
    """It knows the job."""
    client = connect([embedded_etcd.url])
    await client.put(KEYS.state, JobState(phase=Phase.RUNNING, reason="t1 joined").to_bytes())
    await client.close()
    return embedded_etcd


async def in_thread(work, *arguments, **options):
    import asyncio

    return await asyncio.to_thread(lambda: work(*arguments, **options))


@pytest.mark.processes
async def test_nobody_leads_the_job(etcd, tmp_path, capsys):
    a_run(tmp_path, etcd.url)
    with running(tmp_path):
        document = await in_thread(told, capsys, tmp_path)
    assert document["code"] == "NO_MASTER"
    assert "The job's state in etcd: RUNNING (t1 joined)." in document["details"]


@pytest.mark.processes
async def test_the_leader_in_etcd_does_not_answer_either(etcd, tmp_path, capsys, monkeypatch):
    client, url = connect([etcd.url]), nobody()
    await client.put(KEYS.master_address, MasterAddress(url=url, term=1).to_bytes())
    await client.close()
    monkeypatch.setenv("TRIREME_ETCD", etcd.url)
    document = await in_thread(told, capsys, tmp_path, job="digits")
    assert (document["code"], document["summary"]) == (
        "MASTER_SILENT",
        f"The master at {url} does not answer.",
    )


@pytest.mark.processes
async def test_an_etcd_that_does_not_know_the_job(embedded_etcd, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRIREME_ETCD", embedded_etcd.url)
    assert await in_thread(explain, "digits", tmp_path, None, as_json=False) == 3
    assert "holds no job digits" in capsys.readouterr().err


def test_every_code_has_a_row_in_the_table_and_every_row_a_code():
    rows = [
        line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")
    ]
    assert rows == [f"`{code}`" for code in Code]
