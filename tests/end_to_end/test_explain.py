"""`trireme explain` of a job of real processes: while it trains, while its master or its etcd is frozen, and
after it was stopped."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.command import Command, wait_for, wait_for_step
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from trireme.view.child_events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


WITHOUT_PSERVER = ("MEMBER_SILENT", "NO_PARAMETER_SERVER", "ROLLING_BACK")


def explained(trireme: Command) -> dict:
    done = trireme.run("explain", "script", "--json")
    assert done.code == 0, done.err
    document: dict = json.loads(done.out)
    return document


def until_told(trireme: Command, *codes: str) -> dict:
    """Asked again and again: a lease must run out first, or a step be made."""
    deadline = time.monotonic() + 60
    while True:
        document = explained(trireme)
        if document["code"] in codes or time.monotonic() > deadline:
            assert document["code"] in codes, document
            return document


def process_of(folder: Path, child: str) -> psutil.Process:
    pids = [
        event["pid"]
        for event in read_events(folder)
        if event["child"] == child and "started" in event["what"]
    ]
    return psutil.Process(pids[-1])


@pytest.mark.soak  # for its length
@pytest.mark.parametrize("dispatch", ["master", "etcd"])
def test_a_job_that_trains_freezes_and_is_stopped(trireme: Command, tmp_path: Path, dispatch: str) -> None:
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    running = trireme.begin(
        "run",
        script,
        "--dispatch",
        dispatch,
        "--mode",
        "sync",
        "--epochs",
        2000,
        "--trainers",
        2,
        "--pservers",
        1,
    )
    with running:
        wait_for(running, r"^RUNNING ")
        wait_for_step(trireme, 3)
        document = until_told(trireme, "PROGRESS_IS_FINE")
        assert " records/s (" in document["summary"]
        folder = tmp_path / ".trireme" / "script"
        etcd = process_of(folder, "etcd")
        etcd.suspend()
        try:
            until_told(trireme, "ETCD_UNREACHABLE")
        finally:
            etcd.resume()
        until_told(trireme, "PROGRESS_IS_FINE")
        process_of(folder, "pserver-0").suspend()
        until_told(trireme, *WITHOUT_PSERVER)
        until_told(trireme, "PROGRESS_IS_FINE")  # the launcher has ended the frozen process
        running.send_signal(signal.SIGINT)
        done = trireme.end_of(running)
        assert done.code == 130, done.err
    document = explained(trireme)
    assert document["code"] == "JOB_STOPPED"
    assert "Its newest checkpoint is of step" in document["details"][0]
