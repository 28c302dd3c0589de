"""Event loops ask for short slices, the threads that compute beside them do not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trireme_shared.platform.runtime.service import SLICE_NS

TELLS = """
import asyncio, sys, threading
from pathlib import Path
from trireme_shared.platform.runtime import service, telemetry

def told():
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text().splitlines()
    facts = dict(map(str.strip, line.split(":")) for line in lines if ":" in line)
    return facts["se.slice"], facts["prio"]

async def main(stopping):
    print(*told())
    print(*await asyncio.get_running_loop().run_in_executor(None, told))
    return 0

telemetry.configure(service="test")
print(*told())
sys.exit(service.run(main))
"""


def short_slices() -> bool:
    try:
        shown = "se.slice" in Path("/proc/self/sched").read_text()
    except OSError:
        return False
    return shown and tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)


def raised() -> None:
    os.nice(-5)


def lowered() -> None:
    os.nice(7)


def batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.mark.skipif(not short_slices(), reason="Linux 6.12 and later")
@pytest.mark.parametrize(
    ("chosen", "slice_ns"),
    [(None, SLICE_NS), (lowered, SLICE_NS), (batch, None), (raised, None)],
    ids=[
        "as it is",
        "a lower priority",
        "somebody chose another policy",
        "a higher priority stays that of all threads",
    ],
)
def test_a_service_s_loop_has_short_slices_and_the_threads_that_it_starts_do_not(chosen, slice_ns):
    command = [sys.executable, "-c", TELLS]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60, preexec_fn=chosen
        ).stdout
    except subprocess.SubprocessError as error:
        if chosen is not raised or type(error) is not subprocess.SubprocessError:  # that one: `chosen` failed
            raise
        pytest.skip("may not raise its priority")
    before, loop, thread = (line.split() for line in told.splitlines())
    assert loop == [str(slice_ns or before[0]), before[1]]
    assert thread == before
