"""What people see while a job runs and when it is over."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trireme.view.progress import LINE_EVERY_S, LineDisplay, LiveDisplay, Progress, clock_text
from trireme.view.report import Counts, failure_text, number, result_document, summary_text
from trireme_shared.protocol.records import (
    FailureCause,
    JobResult,
    JobSpec,
    JobState,
    Phase,
    Stage,
    UserFailure,
)

RUNNING = Progress(
    phase="RUNNING",
    stage="TRAIN",
    epoch=1,
    epochs=5,
    step=140,
    loss=0.31234,
    records_done=300,
    records_total=1000,
    records_per_s=5120.4,
    eta_s=72.2,
    trainers=1,
    trainers_desired=2,
    pservers=2,
    pservers_desired=2,
    restarts=1,
)
SPEC = JobSpec.model_validate(
    {"job": "ctr", "script": "s", "storage": "d", "dataset": {"kind": "csv", "urls": ["x"]}, "epochs": 2}
)


def test_a_running_job_in_one_line():
    assert RUNNING.training() == "epoch 2/5  step 140  loss 0.3123  5,120 records/s  ETA 1:12"
    assert RUNNING.members() == "trainers 1/2  pservers 2/2  restarts 1"
    assert replace(RUNNING, pservers=0).members() == "trainers 1/2  pservers 0/2  restarts 1"
    assert replace(RUNNING, pservers=0, pservers_desired=0).members() == "trainers 1/2  restarts 1"


def test_a_stalled_job_says_for_whom_it_waits():
    stalled = replace(
        RUNNING, records_per_s=None, eta_s=None, stalled="waiting for trainer-1-4da120b091a6, silent for 14 s"
    )
    assert (
        stalled.training()
        == "epoch 2/5  step 140  loss 0.3123  stalled: waiting for trainer-1, silent for 14 s"
    )


def test_what_is_not_known_yet_is_left_out():
    assert Progress(phase="RUNNING", stage="TRAIN", epochs=3).training() == "epoch 1/3"
    assert (
        Progress(phase="WAITING", stage="TRAIN", reason="waiting for a trainer").training()
        == "waiting for a trainer"
    )
    assert Progress(phase="RUNNING", stage="EVALUATE").training() == "evaluate"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (9.4, "0:09"), (61, "1:01"), (3723, "1:02:03")])
def test_times_left(seconds, text):
    assert clock_text(seconds) == text


def lines_of(*shown):
    out = io.StringIO()
    display = LineDisplay(Console(file=out, width=200))
    for progress, now in shown:
        display.show(progress, now)
    return out.getvalue().splitlines()


def test_without_a_terminal_a_line_comes_every_few_seconds_and_with_each_epoch():
    later = Progress(phase="RUNNING", stage="TRAIN", epoch=2, epochs=5)
    shown = [(RUNNING, 0.0), (RUNNING, LINE_EVERY_S / 2), (RUNNING, LINE_EVERY_S)]
    lines = lines_of(*shown, (later, LINE_EVERY_S + 0.1), (later, LINE_EVERY_S + 1.2))
    assert [line.split("  ")[1] for line in lines] == ["epoch 2/5", "epoch 2/5", "epoch 3/5"]


def test_many_short_epochs_do_not_flood_a_log():
    epochs = [(replace(RUNNING, epoch=number, epochs=400), number * 0.3) for number in range(200)]
    assert len(lines_of(*epochs)) <= 60 / LINE_EVERY_S + 3


def test_on_a_terminal_bar_numbers_and_members_are_drawn_and_events_stay():
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=100, force_terminal=True))
    display.show(RUNNING, 0.0)
    display.event("trainer-1 died (SIGKILL)")
    display.close()
    for part in ("running", "30%", "epoch 2/5", "trainers 1/2", "trainer-1 died (SIGKILL)"):
        assert part in out.getvalue()


def test_the_summary_tells_metrics_restarts_and_where_the_model_is():
    result = JobResult(
        metrics={"accuracy": 0.98611}, exports={"safetensors": "/m.safetensors"}, trained_records=17256
    )
    state = JobState(phase=Phase.COMPLETED, stage=Stage.DONE, generation=4, result=result)
    document = result_document(
        SPEC, state, Counts({"trainer-1": 2}, loss=0.25, steps=540), 23.71, Path("/run")
    )
    assert summary_text(document).splitlines() == [
        "job                  ctr COMPLETED after 23.7 s (sync)",
        "training loss        0.25 (mean of the last epoch)",
        "records              17,256 in 2 epochs",
        "restarts             trainer-1 2",
        "accuracy             0.9861",
        "model (safetensors)  /m.safetensors",
    ]
    assert "records              17,256 in 1 epoch\n" in summary_text(
        document | {"epochs": 1, "epochs_done": 1}
    )


@pytest.mark.parametrize(
    ("phase", "done", "with_loss", "told"),
    [
        (Phase.FAILED, 0, 1, "0.25 (mean of the last epoch that was begun)"),
        (Phase.FAILED, 0, 0, "0.25 (mean of the last epoch that was begun)"),
        (Phase.FAILED, 1, 2, "0.25 (mean of the last epoch that was begun)"),
        (Phase.FAILED, 1, 1, "0.25 (mean of the last epoch)"),
        (Phase.COMPLETED, 2, 0, "0.25 (mean of the last epoch)"),
        (Phase.COMPLETED, 2, 2, "0.25 (mean of the last epoch)"),
    ],
)
def test_the_loss_of_an_epoch_that_is_not_over_is_told_as_that(
    phase: Phase, done: int, with_loss: int, told: str
):
    losses = [{"number": epoch, "loss": 0.25, "records": 4} for epoch in range(with_loss)]
    state = JobState(phase=phase, result=JobResult())
    counts = Counts({}, loss=0.25, epochs=done, by_epoch=losses)
    lines = summary_text(result_document(SPEC, state, counts, 1.0, Path("/run"))).splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith("training loss")] == [told]


def test_the_loss_of_each_epoch_is_told_of_many_the_first_and_the_last() -> None:
    state = JobState(phase=Phase.COMPLETED, result=JobResult())

    def told(epochs: int) -> tuple[list[str], list[dict[str, object]]]:
        losses = [{"number": epoch, "loss": 1 / (epoch + 1), "records": 4} for epoch in range(epochs)]
        document = result_document(SPEC, state, Counts({}, loss=0.5, by_epoch=losses), 1.0, Path("/run"))
        rows = [line for line in summary_text(document).splitlines() if line.startswith("loss by epoch")]
        return rows, document["loss_by_epoch"]

    assert told(1) == ([], [{"epoch": 0, "loss": 1.0}])
    assert told(3)[0] == ["loss by epoch  1  0.5  0.3333"]
    [row], every = told(20)
    assert row.split()[3:] == [
        "1",
        "...",
        "0.07143",
        "0.06667",
        "0.0625",
        "0.05882",
        "0.05556",
        "0.05263",
        "0.05",
    ]
    assert len(every) == 20


def test_discarded_records_are_told():
    result = JobResult(discarded_tasks=7, discarded_records=64)
    lost = {
        "task_id": "6",
        "kind": "TRAIN",
        "epoch": 1,
        "file": "/x.npy",
        "first": 24,
        "count": 4,
        "failures": 3,
    }
    lost |= {"cause": "ValueError: no", "stream": 0}
    counts = Counts({}, discarded=[lost] * 7)
    document = result_document(
        SPEC, JobState(phase=Phase.COMPLETED, result=result), counts, 1.0, Path("/run")
    )
    line = "           /x.npy records 24-27, epoch 1: ValueError: no"
    assert summary_text(document).splitlines()[-7:] == [
        "discarded  7 tasks, 64 records",
        *[line] * 5,
        "           and 2 more: trireme run --json lists them",
    ]
    assert document["discarded"]["list"][0] == {name: lost[name] for name in lost if name != "stream"}
    failed = result_document(SPEC, JobState(phase=Phase.FAILED), counts, 1.0, Path("/run"))
    assert (failed["discarded"]["tasks"], failed["discarded"]["records"]) == (7, 28)


def test_a_failed_job_shows_the_users_traceback_first():
    failure = UserFailure(
        error_type="KeyError",
        message="'z'",
        traceback="Traceback (most recent call last):\nKeyError: 'z'\n",
        task="task 7",
        trainer="trainer-0-ab",
    )
    state = JobState(phase=Phase.FAILED, reason="KeyError twice", failure=failure)
    assert failure_text(state, Path("/run")).splitlines() == [
        "Traceback (most recent call last):",
        "KeyError: 'z'",
        "in task 7 at trainer-0-ab",
        "error: job failed: KeyError twice",
        (
            "hint: started again with the same command, it starts from the beginning, and the files of "
            "this run move to /run/previous"
        ),
        "logs: /run/logs",
    ]


def test_a_job_that_failed_for_lack_of_members_says_that_it_can_go_on():
    state = JobState(phase=Phase.FAILED, reason="pserver-1 did not come back", cause=FailureCause.MEMBERS)
    assert failure_text(state, Path("/run"), resumable=True).splitlines() == [
        "error: job failed: pserver-1 did not come back",
        "hint: started again with the same command, it goes on from its newest checkpoint",
        "logs: /run/logs",
    ]
    document = result_document(SPEC, state, Counts({}), 1.0, Path("/run"), resumable=True)
    assert (document["cause"], document["resumable"]) == ("MEMBERS", True)
    assert summary_text(document, reason=True).splitlines()[-1] == "reason    pserver-1 did not come back"


@pytest.mark.parametrize(("value", "text"), [(93.0, "93"), (0.97222, "0.9722"), (1e-7, "1e-07")])
def test_numbers(value, text):
    assert number(value) == text
