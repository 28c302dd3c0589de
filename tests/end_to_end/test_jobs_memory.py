"""benchmarks/jobs_memory.py with few short jobs: a real leader, a real etcd, real members. What the jobs took
is free again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 300.0
MASTER_MIB = 4.0  # that a second wave may add: its events, and what malloc cut into pieces
LIVE_KIB = 64.0


@pytest.mark.soak  # for its length
@pytest.mark.processes
@pytest.mark.timeout(360)
def test_jobs_that_were_deleted_leave_nothing_in_etcd_and_little_in_the_leader() -> None:
    options = {"jobs": 6, "seconds": 2, "waves": 2, "trainers": 2, "pservers": 2}
    command = [
        sys.executable,
        "-m",
        "benchmarks.jobs_memory",
        "--json",
        *(f"--{key}={n}" for key, n in options.items()),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second = json.loads(ended.stdout)
    for wave in (first, second):
        assert wave["wrong"] == []
        assert wave["after"]["keys"] == first["before"]["keys"] < wave["peak_keys"]
        assert wave["after"]["live_kib"] < first["before"]["live_kib"] + LIVE_KIB
    assert second["after"]["master_mib"] < first["after"]["master_mib"] + MASTER_MIB
