"""What `trireme chaos kill` prints."""

from __future__ import annotations

from trireme.cli.chaos import Receipt
from trireme.view.report import without_tokens


def test_a_synchronous_job_is_told_by_its_steps():
    receipt = Receipt(
        "ctr", "pserver-1", 77, "it was seen", 0.031, 241, 0.48, None, True, 240, 1575, 0, {}, "RUNNING"
    )
    assert receipt.text().splitlines() == [
        "killed              pserver-1 (pid 77, SIGKILL) of job ctr",
        "noticed             0.03 s later: it was seen",
        "next committed step 0.48 s (step 241)",
        "records replayed    1,575 (the job went back to step 240)",
        "records lost        0",
        "job                 RUNNING",
    ]


def test_an_asynchronous_job_has_no_common_count_and_its_losses_are_told():
    lost = {"pserver-0": 0, "pserver-1": 36}
    receipt = Receipt("ctr", "etcd", 77, "seen", 0.0, None, 0.48, 0.5, True, None, 64, 0, lost, "RUNNING")
    assert receipt.text().splitlines()[2:] == [
        "next committed step 0.48 s",
        "next task given out 0.50 s",
        "records replayed    64 (the job went back to its newest checkpoint)",
        "records lost        0",
        "updates lost        pserver-1: 36 minibatches",
        "job                 RUNNING",
    ]


def test_processes_are_called_as_chaos_kill_takes_them():
    sentence = (
        "trainer-0-4da120b091a6 is gone; trainer-1-1f79ea5c96f3 joined; checkpoint 2209a0db at my-host-17"
    )
    assert (
        without_tokens(sentence) == "trainer-0 is gone; trainer-1 joined; checkpoint 2209a0db at my-host-17"
    )
