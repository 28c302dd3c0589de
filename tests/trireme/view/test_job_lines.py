"""Jobs of a cluster as lines."""

from __future__ import annotations

import io

from rich.console import Console

from trireme.cli.cluster.job_lines import LiveLines, PlainLines, columns_of
from trireme.view.report import without_tokens


def job(name: str, state: str, step: int | None = None, reason: str = "") -> dict:
    progress = {"epoch": 1, "epochs": 4, "step": step, "loss": 0.5, "records_done": 25, "records_total": 100}
    trains = step is not None
    unknown = {"epoch": 0, "epochs": 4, "step": None, "loss": None, "records_done": 0, "records_total": 0}
    return {
        "job": name,
        "state": state,
        "reason": reason,
        "standing": "ACTIVE" if trains else state,
        "wanted": "run",
        "progress": progress | {"records_per_s": 1000.0, "eta_s": 9.0} if trains else unknown,
        "members": {"trainers": 1, "trainers_desired": 2, "pservers": 1, "pservers_desired": 1},
    }


def shown(*pictures: tuple[float, list[dict]]) -> list[str]:
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=200))
    for now, jobs in pictures:
        lines.show(jobs, now)
    return out.getvalue().splitlines()


def test_a_job_is_one_line_with_what_it_does_and_who_does_it():
    assert columns_of(job("ctr", "RUNNING", 7)) == (
        "ctr",
        "running",
        "25%",
        "epoch 2/4  step 7  loss 0.5  1,000 records/s  ETA 0:09",
        "trainers 1/2  pservers 1/1",
    )
    why = "waits for 2 trainers; host-0-trainer-1-0123456789ab is gone"
    assert columns_of(job("ctr", "QUEUED", reason=why))[3:] == (
        why.removesuffix("-0123456789ab is gone") + " is gone",
        "",
    )


def test_a_job_that_is_being_stopped_says_so_until_it_has_stopped_and_never_that_it_starts():
    asked = {"standing": "ACTIVE", "wanted": "pause"}
    saving, left = job("a", "RUNNING", 7) | asked, job("a", "STARTING", reason="") | asked
    assert columns_of(saving)[1:4] == ("pausing", "25%", "saves a checkpoint, then its members leave")
    assert columns_of(left)[1] == "pausing"
    assert columns_of(job("a", "RUNNING", 7) | asked | {"wanted": "cancel"})[1] == "cancelling"
    paused = job("a", "PAUSED", reason="paused by its user") | {"standing": "PAUSED", "wanted": "pause"}
    assert columns_of(paused)[1:] == ("paused", "", "paused by its user", "")
    lines = shown((0, [saving]), (0.1, [left]), (0.2, [paused]))
    assert [line.split()[1] for line in lines] == ["pausing", "paused"]


def test_the_id_of_an_operation_stays_whole_where_names_of_processes_lose_their_tokens():
    sentence = "op-cc2043bc-1d6e-5c93-804c-f63ba87ecb48 waits for host-0-trainer-1-0123456789ab"
    assert without_tokens(sentence) == "op-cc2043bc-1d6e-5c93-804c-f63ba87ecb48 waits for host-0-trainer-1"


def test_a_pipe_gets_changes_at_once_and_what_runs_every_few_seconds():
    running, done = job("a", "RUNNING", 1), job("b", "COMPLETED", reason="exported")
    done["progress"] = running["progress"] | {"records_done": 100}  # as its last term left it
    waiting = job("b", "QUEUED", reason="no parameter server")
    lines = shown(
        (0, [running, waiting]), (1, [running, waiting]), (2, [running, done]), (6, [running, done])
    )
    assert [line.split()[:2] for line in lines] == [
        ["a", "running"],
        ["b", "queued"],
        ["b", "completed"],
        ["a", "running"],
    ]


def test_a_terminal_shows_at_most_twenty_jobs_those_that_go_on_first():
    out = io.StringIO()
    lines = LiveLines(Console(file=out, width=120, height=60, force_terminal=True))
    lines.show([*(job(f"old-{n}", "COMPLETED") for n in range(30)), job("new", "RUNNING", 1)], 0.0)
    lines.close()
    text = out.getvalue()
    assert (
        text.index("new") < text.index("old-0"),
        "old-18" in text,
        "old-19" in text,
        "and 11 more" in text,
    ) == (
        True,
        True,
        False,
        True,
    )
