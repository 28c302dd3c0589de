"""Processors and memory of containers: affinity, quotas of both versions of cgroups, whichever is least."""

from __future__ import annotations

import os

import pytest

from trireme_shared.platform.runtime import limits


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(192)))


def machine(folder, files, own="0::/\n"):
    """The mounted cgroups, and what the process is told of its own ones."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({}, "0::/\n", 192),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 192),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "20000 100000\n"}, "0::/\n", 1),
        ({"pod/cpu.max": "800000 100000\n", "pod/one/cpu.max": "max 100000\n"}, "0::/pod/one\n", 8),
        ({"pod/cpu.max": "800000 100000\n", "pod/one/cpu.max": "300000 100000\n"}, "0::/pod/one\n", 3),
        ({"cpu.max": "400000 100000\n"}, "0::/of/the/host\n", 4),
        (
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/docker/1\n0::/\n",
            2,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 192),
        (
            {"cpu/slurm/cpu.cfs_quota_us": "600000\n", "cpu/slurm/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/slurm/job_1\n",
            6,
        ),
    ],
)
def test_cores_are_those_of_the_least_quota(tmp_path, files, own, cores):
    assert limits.cores(*machine(tmp_path, files, own)) == cores


def test_cores_are_never_more_than_the_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 3})
    assert limits.cores(*machine(tmp_path, {"cpu.max": "6400000 100000\n"})) == 2


def test_a_system_without_cgroups_has_the_cores_of_the_affinity(tmp_path):
    assert limits.cores(tmp_path / "no", tmp_path / "none") == 192


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({"memory.max": "4096\n"}, "0::/\n", 4096),
        ({"memory.max": "8192\n", "job/memory.max": "4096\n"}, "0::/job\n", 4096),
        ({"memory/memory.limit_in_bytes": "4096\n"}, "9:memory:/docker/1\n", 4096),
        ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, "9:memory:/\n", None),
        ({"memory.max": "max\n"}, "0::/\n", None),
    ],
)
def test_memory_is_that_of_the_least_limit(tmp_path, files, own, limit):
    whole = limits.memory_bytes(tmp_path / "no", tmp_path / "none")
    assert limits.memory_bytes(*machine(tmp_path, files, own)) == (limit or whole)
    assert whole > 1 << 28
