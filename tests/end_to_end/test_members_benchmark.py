"""benchmarks/members.py with few members: a real etcd, a real master, simulated members that join, settle and
end; and with few jobs of a cluster, whose places are simulated and which others look at."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 90.0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_few_simulated_members_join_and_settle(mode: str) -> None:
    options = {
        "trainers": 12,
        "pservers": 3,
        "join-seconds": 0.5,
        "pserver-seconds": 0.2,
        "calm-seconds": 0.5,
    }
    options |= {"lanes": 16, "processes": 1, "tasks": 16, "mode": mode}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.members", "--json", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert 1 <= result["generations"] <= 12
    assert result["settle_s"] < LIMIT_S
    assert result["told_mib"] > 0
    assert result["master_requests"] >= 12  # each trainer asked for a task
    assert result["cpu_s"]["master"] >= 0


@pytest.mark.timeout(400)
def test_a_few_jobs_of_a_cluster_train_while_others_look() -> None:
    options = {"jobs": 4, "places": 12, "dashboards": 2, "viewers": 4, "seconds": 2, "changes": 2}
    options |= {"task-seconds": 1, "processes": 1, "tasks": 200}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.members", "--json", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["jobs"], found["places"]) == (4, 12)
    assert len(found["schedule_ms"]) == len(found["listed_ms"]) == 3
    assert 0 < found["schedule_ms"][0] <= found["schedule_ms"][2]
    assert found["events"] > 4
    assert 0 < found["descriptors"] < 200
    assert found["leader_mib"] > 10
