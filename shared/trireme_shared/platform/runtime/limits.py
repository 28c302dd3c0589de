"""What this process may use of its machine: processors and memory.

A container sees all processors of its host, and the limits that it was given stand in its cgroup:

    affinity, quota of each cgroup on the way (cpu.max, or cpu.cfs_quota_us of version 1)   ─► cores
    memory of the machine, memory.max (memory.limit_in_bytes) of each cgroup on the way     ─► bytes
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cores(mounted: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Processors that this process may use, at least 1. A quota of 1.5 counts as 2, so that it can be used
    up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(mounted, own))]))


def memory_bytes(mounted: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Memory that all processes of this machine, or of this container, may use together."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        *(_number(folder / "memory.max") for folder in _folders(mounted, own, "")),
        *(_number(folder / "memory.limit_in_bytes") for folder in _folders(mounted, own, "memory")),
    ]
    return min([total, *(limit for limit in limits if limit is not None)])


def _quotas(mounted: Path, own: Path) -> Iterator[float]:
    """Processors that the cgroups allow, as fractions; none without a quota."""
    for folder in _folders(mounted, own, ""):
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
    for folder in _folders(mounted, own, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:  # -1: no limit
            yield quota_us / period_us


def _folders(mounted: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroup of this process and of those above it. `controller`: of version 1; "": of
    version 2. A container without a cgroup namespace is told its path on the host, and sees itself as the
    root."""
    root, path = mounted / controller, ""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, its_path = line.split(":", 2)
            if controller in controllers.split(","):
                path = its_path
    yield root
    for part in Path(path.lstrip("/")).parts:
        root /= part
        yield root


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
