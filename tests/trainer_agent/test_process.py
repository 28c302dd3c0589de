"""The trainer's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.processes
def test_a_process_without_a_job_says_which_setting_is_missing():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    done = subprocess.run(
        [sys.executable, "-m", "trainer_agent"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "TRIREME_JOB: Field required\n"
