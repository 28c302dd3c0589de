"""Whether a process works, by its line in /proc."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.runtime.processor_use import ProcessorUse, parsed, processor_use


def stat_of(state: str, name: str = "python") -> str:
    """142 ticks in user mode, 58 in the kernel."""
    return f"7 ({name}) {state} 1 7 7 0 -1 4194304 100 0 2 0 142 58 9 9 20 0 3 0 500 1 2\n"


@pytest.mark.parametrize("name", ["python", "a) Z (b", ")"])
def test_the_time_in_user_mode_and_in_the_kernel_counts_whatever_the_process_is_called(name, monkeypatch):
    monkeypatch.setattr("shared.runtime.processor_use._TICKS_PER_S", 100)
    assert parsed(stat_of("R", name)) == ProcessorUse(2.0, stopped=False)


def test_a_stopped_process_is_told_from_one_that_runs_sleeps_or_waits_for_a_disk():
    assert [parsed(stat_of(state)).stopped for state in "RSDTt"] == [False, False, False, True, True]


def test_a_twentieth_of_a_processor_since_the_last_look_is_work():
    before = ProcessorUse(10.0, stopped=False)
    assert ProcessorUse(10.11, stopped=False).works(before, 2.0)
    assert not ProcessorUse(10.09, stopped=False).works(before, 2.0)
    assert not ProcessorUse(12.0, stopped=True).works(before, 2.0), "it was stopped after that"
    assert not ProcessorUse(10.0, stopped=False).works(None, 2.0), "nobody knows when it worked"


def test_of_a_process_that_is_gone_nothing_is_known():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert processor_use(process.pid) is None
