"""Child processes: their logs, how they ended, and that none outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trireme.launch import processes
from trireme.launch.processes import Child, Exit, tail_of
from trireme_shared.platform.membership.local_script import ScriptChanged
from trireme_shared.platform.runtime import begun
from trireme_shared.platform.runtime.out_of_memory import MemoryGroup, MemoryKills
from trireme_shared.platform.runtime.service import EXIT_CODES

pytestmark = pytest.mark.processes


def child_of(tmp_path: Path, code: str) -> Child:
    return Child(
        "trainer-0", [sys.executable, "-u", "-c", code], dict(os.environ), tmp_path / "logs" / "trainer-0.log"
    )


async def test_output_of_every_life_is_in_one_log(tmp_path):
    child = child_of(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    for _ in range(2):
        await child.start()
        end = await child.wait()
    assert (end.code, str(end), child.starts) == (0, "exit code 0", 2)
    assert sorted(child.log.read_text().split()) == ["err", "err", "out", "out"]


async def test_a_killed_child_tells_the_signal(tmp_path):
    child = child_of(tmp_path, "import time; time.sleep(60)")
    await child.start()
    child.send(signal.SIGKILL)
    assert str(await child.wait()) == "SIGKILL"
    assert not child.alive


async def test_a_child_that_the_kernel_kills_for_lack_of_memory_tells_it_and_no_other_kill_is_taken_for_it(
    tmp_path, monkeypatch
):
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    kills = MemoryKills(MemoryGroup((tmp_path,)))
    monkeypatch.setattr(processes, "memory_kills", lambda: kills)
    child, told = child_of(tmp_path, "import time; time.sleep(60)"), []
    for oom_kills, kill in ((1, os.kill), (1, os.kill), (2, lambda _, number: child.send(number))):
        await child.start()
        events.write_text(f"oom_kill {oom_kills}\n")
        kill(child.pid, signal.SIGKILL)
        told.append(str(await child.wait()))
    assert told == ["out of memory", "SIGKILL", "SIGKILL"]


async def test_the_next_life_learns_how_the_one_before_it_ended_and_what_it_had_begun(tmp_path):
    journal = tmp_path / "logs" / "trainer-0.begun"
    code = (
        "import os, sys; from pathlib import Path; from trireme_shared.platform.runtime import begun\n"
        "journal = begun.open_journal(Path(os.environ[begun.FILE]))\n"
        "print(os.environ.get(begun.LAST_END), journal.left)\n"
        "journal.begin('trainer-0-1')\n"
        "with begun.at(b'task 7'): os.abort()\n"
    )
    child = child_of(tmp_path, code)
    child.environment[begun.FILE] = str(journal)
    for _ in range(2):
        await child.start()
        await child.wait()
        assert (child.left.process, child.left.works) == ("trainer-0-1", (b"task 7",))
    child.pardon()
    assert child.left is None
    first, second = child.log.read_text().splitlines()
    assert first == "None None"
    assert second.startswith("SIGABRT Left(process='trainer-0-1', works=(b'task 7',)")


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    child = child_of(
        tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)"
    )
    await child.start()
    while "up" not in tail_of(child.log):
        time.sleep(0.02)
    await child.end(grace_s=0.2)
    assert (await child.wait()).code == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only where processes have descriptors")
@pytest.mark.parametrize("ends", ["by itself", "killed"])
async def test_what_a_child_has_left_running_has_ended_when_its_end_is_told(tmp_path, ends):
    code = (
        "import signal, subprocess, sys, time\n"
        "asleep = 'import time; print(1, flush=True); time.sleep(600)'\n"
        "stubborn = 'import signal; signal.signal(15, signal.SIG_IGN);' + asleep\n"
        "for code in (asleep, stubborn):\n"
        "    left = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "    left.stdout.readline()\n"
        "    print('left', left.pid)\n"
        f"time.sleep({0 if ends == 'by itself' else 600})\n"
    )
    child = child_of(tmp_path, code)
    await child.start()
    while tail_of(child.log).count("left") < 2:
        time.sleep(0.02)
    left = [int(line.split()[1]) for line in tail_of(child.log).splitlines()]
    if ends == "killed":
        child.send(signal.SIGKILL)
    assert (await child.wait()).code == (0 if ends == "by itself" else -signal.SIGKILL)
    assert not [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_the_tail_of_a_log_is_its_last_lines(tmp_path):
    child = child_of(tmp_path, "")
    assert tail_of(child.log) == ""
    child.log.parent.mkdir()
    child.log.write_text("\n".join(str(number) for number in range(10_000)))
    assert tail_of(child.log, 2) == "9998\n9999"


def test_an_end_is_told_in_words():
    assert [str(Exit(1, code, 0.0)) for code in (0, 3, -9, -11)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "SIGSEGV",
    ]
    assert "stop the job and start it again" in str(Exit(1, EXIT_CODES[ScriptChanged.code], 0.0))


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG is Linux's")
def test_no_child_outlives_a_launcher_that_is_killed(tmp_path):
    launcher = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from trireme.launch.processes import Child\n"
        "async def main():\n"
        "    child = Child('x', [sys.executable, '-c', 'import time; time.sleep(60)'], "
        f"dict(os.environ), Path({str(tmp_path)!r}) / 'x.log')\n"
        "    await child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running()
