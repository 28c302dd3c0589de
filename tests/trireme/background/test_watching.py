"""What a user sees of a run, and the values that it gives."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from trireme.background.run import RunResult
from trireme.background.series import columns, outside_any_loop
from trireme.background.supervised import MOST_LOSSES, End, Told
from trireme.background.watching import Lines, Picture, svg
from trireme.data import TextLines
from trireme.view.progress import Progress
from trireme.view.report import Counts, result_document
from trireme_shared.protocol.records import JobSpec, JobState, Phase

RUNNING = Progress(
    phase="RUNNING", stage="TRAIN", epochs=5, step=40, loss=0.5, records_done=1, records_total=4
)


def told(**values) -> Told:
    return Told(begun={"job": "digits", "folder": "/digits"}, progress=RUNNING, **values)


def test_at_a_prompt_lines_come_only_while_the_user_waits(capsys):
    lines = Lines(always=False)
    lines.take("event", "while something is typed", told())
    with lines.attended():
        lines.take("event", "while the user waits", told())
        lines.take("progress", None, told())
        lines.take("output", [["trainer-0", "hello"]], told())
        lines.take("ended", End({"phase": "COMPLETED", "metrics": {"accuracy": 0.97}}), told())
    lines.take("event", "afterwards", told())
    assert capsys.readouterr().err.splitlines() == [
        "while the user waits",
        "RUNNING  epoch 1/5  step 40  loss 0.5  trainers 0/0  restarts 0",
        "trainer-0 │ hello",
        "COMPLETED  accuracy 0.97",
    ]


def test_in_a_script_lines_always_come(capsys):
    Lines(always=True).take("event", "trainer-0 joined", told())
    assert capsys.readouterr().err == "trainer-0 joined\n"


def test_losses_of_a_job_that_goes_back_are_told_again_and_stay_few():
    told = Told()
    for step in [*range(1, 100), 50, 51]:
        told.take_progress(Progress(phase="RUNNING", stage="TRAIN", step=step, loss=1.0))
    assert [step for step, _ in told.losses] == list(range(1, 52))
    for step in range(52, 10 * MOST_LOSSES):
        told.take_progress(Progress(phase="RUNNING", stage="TRAIN", step=step, loss=1.0))
    assert len(told.losses) <= MOST_LOSSES
    assert told.losses[0][0] == 1


def test_a_picture_is_text_and_html_and_shows_nothing_of_a_script_as_markup():
    losses = [(1.0, 2.0), (2.0, 1.0)]
    picture = Picture(told(losses=losses, lines=[("trainer-0", "<script>alert(1)</script>")]))
    html = picture.html()
    assert "<script>" not in html
    assert "trainer-0 │ &lt;script&gt;" in html
    assert '<progress max="1" value="0.250">' in html
    assert 'aria-label="loss from 2 at step 1 to 1 at step 2"' in html
    assert repr(picture).splitlines()[:2] == ["digits RUNNING", "epoch 1/5  step 40  loss 0.5"]
    assert "loss █▁" in repr(picture)


def test_a_chart_of_one_point_or_of_one_value_is_drawn_without_dividing_by_nothing():
    assert svg([(1, 0.5)]) == ""
    assert 'points="0.0,0.0 480.0,0.0"' in svg([(1, 0.5), (9, 0.5)])


def test_a_result_has_what_json_prints_under_the_same_names():
    spec = JobSpec(job="digits", script="-", storage="/run", dataset=TextLines("-"))
    document = result_document(
        spec, JobState(phase=Phase.COMPLETED), Counts({}, loss=0.25), 1.5, Path("/run")
    )
    assert asdict(RunResult.of(document)) == document
    assert [field.name for field in fields(RunResult)] == list(document)


def test_columns_have_one_length_and_none_where_a_metric_has_no_value():
    found = columns("step", {"loss": [(1, 2.0), (2, 1.5)], "accuracy": [(2, 0.5), (4, 0.6)]})
    assert found == {"step": [1, 2, 4], "loss": [2.0, 1.5, None], "accuracy": [None, 0.5, 0.6]}
    assert columns("epoch", {"loss": []}) == {"epoch": [], "loss": []}


async def test_a_coroutine_runs_while_the_loop_of_this_thread_does():
    async def work() -> int:
        return 3

    async def fails() -> None:
        raise ValueError("no")

    assert outside_any_loop(work(), 10.0, "work") == 3
    with pytest.raises(ValueError, match="no"):
        outside_any_loop(fails(), 10.0, "work")
