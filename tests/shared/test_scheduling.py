"""Event loops ask for short slices, the threads that compute beside them do not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shared.scheduling import SLICE_NS

TELLS = """
import asyncio, sys, threading
from pathlib import Path
from shared import service, telemetry

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


@pytest.mark.skipif(not short_slices(), reason="Linux 6.12 and later")
@pytest.mark.parametrize(
    ("command", "slice_ns"),
    [([], SLICE_NS), (["nice", "-n", "7"], SLICE_NS), (["chrt", "--batch", "0"], None)],
    ids=["as it is", "nice", "somebody chose another policy"],
)
def test_a_service_s_loop_has_short_slices_and_the_threads_that_it_starts_do_not(command, slice_ns):
    text = subprocess.run(
        [*command, sys.executable, "-c", TELLS], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    before, loop, thread = (line.split() for line in text.splitlines())
    assert loop == [str(slice_ns or before[0]), before[1]]
    assert thread == before


@pytest.mark.skipif(os.geteuid() != 0, reason="a nice value below 0 needs root")
@pytest.mark.skipif(not short_slices(), reason="Linux 6.12 and later")
def test_a_higher_priority_stays_that_of_all_threads():
    text = subprocess.run(
        ["nice", "-n", "-5", sys.executable, "-c", TELLS], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    before, loop, thread = text.splitlines()
    assert before == loop == thread
