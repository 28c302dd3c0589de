"""A control group with a small limit of memory: the kernel kills a process there that takes more."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trireme_shared.platform.runtime.out_of_memory import MOUNT, MemoryGroup

REMOVE_S = 10.0


@dataclass(frozen=True)
class SmallGroup:
    """`procs`: the file that takes processes, by number, into the group."""

    group: MemoryGroup
    procs: Path


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[SmallGroup | None]:
    """None: none can be made here. Its processes must have ended at the end of `with`."""
    version = 1 if (MOUNT / "memory" / "memory.oom_control").exists() else 2
    folder = (MOUNT / "memory" if version == 1 else MOUNT) / f"trireme-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield SmallGroup(MemoryGroup((folder,), version), folder / "cgroup.procs")
    finally:
        deadline = time.monotonic() + REMOVE_S
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the dead processes are still being counted
                folder.rmdir()
            time.sleep(0.05)
