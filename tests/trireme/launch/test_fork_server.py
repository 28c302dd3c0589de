"""Forked children behave like spawned ones: they are the launcher's children, also after the fork server is
killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.equipment.command_lines import command_line
from trireme.launch.processes import PYTHON_MODULE, Child, Forked, ForkServer, inherited_environment, tail_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forking servers are Linux's"),
]

SAYS_WHAT_IT_IS = """
import asyncio, atexit, json, os, random, sys, threading
import numpy
def later():
    threading.Event().wait(0.1)
    print("thread")
print(json.dumps({
    "module": __name__, "argv": sys.argv[1:], "environment": dict(os.environ),
    "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0) == os.getpid(),
    "stdin": sys.stdin.read(), "main": __spec__.name, "drawn": [random.random(), numpy.random.random()],
    "torch": "torch" in sys.modules, "hash": hash("near"), "threads": threading.active_count()}))
print("err", file=sys.stderr)
atexit.register(print, "atexit")
threading.Thread(target=later).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Where modules of a test lie; the fork server and its children find them."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # pytest changes it as it likes

    def write(name: str, code: str) -> str:
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


def child_of(forks: ForkServer, folder: Path, name: str, *argv: str, **environment: str) -> Child:
    variables = inherited_environment() | {"TRIREME_NAME": name} | environment
    return Child(name, [*PYTHON_MODULE, *argv], variables, folder / f"{name}.log", forks.start)


def is_forked(child: Child) -> bool:
    return type(child.process) is Forked


async def test_a_forked_child_has_its_own_arguments_environment_session_output_and_exit_code(
    tmp_path, modules
):
    module = modules("says", SAYS_WHAT_IT_IS)
    drawn = set()
    with ForkServer() as forks:
        for code in (0, 3):
            child = child_of(forks, tmp_path, "pserver-0", module, str(code), TRIREME_JOB=f"job-{code}")
            await child.start()
            assert is_forked(child)
            end = await child.wait()
            assert (end.pid, end.code, child.alive) == (child.pid, code, False)
            said, *rest = child.log.read_text().splitlines()[-4:]
            facts = json.loads(said)
            expected = inherited_environment() | {"TRIREME_NAME": "pserver-0", "TRIREME_JOB": f"job-{code}"}
            assert facts.pop("environment") == expected
            drawn |= set(facts.pop("drawn"))
            spawned = [sys.executable, "-c", "print(hash('near'))"]
            assert facts.pop("hash") == int(subprocess.check_output(spawned, env=expected))
            assert facts == {
                "module": "__main__",
                "argv": [str(code)],
                "parent": os.getpid(),
                "session": forks.server.pid,
                "group": True,
                "stdin": "",
                "main": "says",
                "torch": facts["torch"],
                "threads": 1,
            }
            assert rest == ["err", "thread", "atexit"]
    assert len(drawn) == 4, "children draw the same random numbers"


async def test_members_are_forked_with_torch_already_there_and_show_who_they_are(tmp_path, modules):
    """Settings that cannot be: each ends with its own words, as if it had been spawned."""
    module = modules("waits", "import sys, time\nprint('torch' in sys.modules, flush=True)\ntime.sleep(60)")
    with ForkServer() as forks:
        for member, code in (("trainer_agent", 2), ("pserver_service", 2), ("master_service", 2)):
            child = child_of(forks, tmp_path, member, member)
            await child.start()
            assert is_forked(child)
            assert (await child.wait()).code == code
            assert "TRIREME_JOB" in tail_of(child.log)
        waiting = child_of(forks, tmp_path, "trainer-0", module)
        await waiting.start()
        while not tail_of(waiting.log):
            await asyncio.sleep(0.01)
        assert tail_of(waiting.log) == "True"
        assert command_line(psutil.Process(waiting.pid)) == " ".join([*PYTHON_MODULE, module, "[trainer-0]"])
        waiting.send(signal.SIGKILL)
        assert str(await waiting.wait()) == "SIGKILL"


async def test_a_killed_fork_server_takes_nobody_along_and_another_one_is_made(tmp_path, modules):
    module = modules("waits", "import time\ntime.sleep(60)")
    with ForkServer() as forks:
        one, other = (child_of(forks, tmp_path, f"trainer-{n}", module) for n in range(2))
        await one.start()
        before = forks.pid
        os.kill(before, signal.SIGKILL)
        await other.start()
        assert forks.pid not in (0, before)
        assert is_forked(other)
        assert one.alive
        assert not psutil.pid_exists(before)
    assert all(psutil.Process(child.pid).ppid() == os.getpid() for child in (one, other))
    for child in (one, other):
        await child.end(grace_s=5.0)
        assert (await child.wait()).code == -signal.SIGTERM


async def test_a_fork_server_killed_in_mid_start_costs_no_start(tmp_path, modules):
    """Whenever it dies, there is one child: forked by the next server, or spawned where that is killed as
    well."""
    module = modules("ends", "print('one')")
    with ForkServer() as forks:
        for moment in range(6):
            child = child_of(forks, tmp_path, f"trainer-{moment}", module)
            async with asyncio.TaskGroup() as group:
                starting = group.create_task(child.start())
                for _ in range(1 + moment % 2):
                    while forks.pid == 0 and not starting.done():
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.02 * moment)
                    if forks.pid:
                        os.kill(forks.pid, signal.SIGKILL)
            assert (await child.wait()).code == 0
            assert tail_of(child.log) == "one"


async def test_what_differs_in_more_than_settings_of_ours_is_spawned(tmp_path, modules, monkeypatch):
    module = modules("ends", "")
    with ForkServer() as forks:
        other = child_of(forks, tmp_path, "trainer-0", module, OMP_NUM_THREADS="3")
        await other.start()
        assert not is_forked(other)
        assert (await other.wait()).code == 0
    monkeypatch.setenv("TRIREME_START", "spawn")
    with ForkServer() as forks:
        child = child_of(forks, tmp_path, "trainer-1", module)
        await child.start()
        assert (is_forked(child), forks.pid) == (False, 0)
        assert (await child.wait()).code == 0


@pytest.mark.parametrize("when", ["while it runs", "while it starts"])
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path, modules, when):
    modules("sleeps", "import time\ntime.sleep(60)")
    launcher = f"""
        import asyncio, os
        from pathlib import Path
        from trireme.launch.processes import Child
        from trireme.launch.processes import PYTHON_MODULE, ForkServer, inherited_environment
        async def main():
            with ForkServer() as forks:
                for name in ("a", "b"):
                    log = Path({str(tmp_path)!r}) / name
                    child = Child(name, [*PYTHON_MODULE, "sleeps"], inherited_environment(), log, forks.start)
                    await child.start()
                    print(child.pid, forks.pid, flush=True)
                    if {when == "while it starts"}:
                        asyncio.get_running_loop().call_later(0.002, os.kill, os.getpid(), 9)
                await child.wait()
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        family = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(family) == 2
        if when == "while it runs":
            family += [psutil.Process(int(process.stdout.readline().split()[0]))]
            process.kill()
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left
    deadline = time.monotonic() + 5
    while (sleeping := sleepers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleeping


@pytest.mark.parametrize(
    "launcher_ends", [False, True], ids=["the member is killed", "the launcher is killed"]
)
def test_what_a_script_has_started_does_not_outlive_its_member(tmp_path, modules, launcher_ends):
    """Neither a process that leaves when it is asked to, nor one that does not; one of another session, with
    the same program, goes on."""
    modules("starts", STARTS)
    launcher = f"""
        import asyncio, signal, sys
        from pathlib import Path
        from trireme.launch.processes import Child
        from trireme.launch.processes import PYTHON_MODULE, ForkServer, inherited_environment
        async def main():
            with ForkServer() as forks:
                log = Path({str(tmp_path / "log")!r})
                child = Child("a", [*PYTHON_MODULE, "starts"], inherited_environment(), log, forks.start)
                await child.start()
                while log.read_text().count("\\n") < 4:
                    await asyncio.sleep(0.02)
                print(child.pid, log.read_text().replace("\\n", " "), flush=True)
                sys.stdin.readline()
                child.send(signal.SIGKILL)
                await child.wait()
                print("waited", flush=True)
                sys.stdin.readline()
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(launcher)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        member, child, stubborn, forked, stranger = (
            psutil.Process(int(pid)) for pid in process.stdout.readline().split()
        )
        try:
            if launcher_ends:
                process.kill()
                assert not psutil.wait_procs([member, child, stubborn, forked], timeout=30)[1]
            else:
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "waited\n"
                alive = [each for each in (member, child, stubborn, forked) if _lives(each)]
                assert not alive, "they are gone before the end of the member is told"
                process.stdin.write("\n")
            assert _lives(stranger)
        finally:
            stranger.kill()


STARTS = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(600)"
print(subprocess.Popen(sleep).pid, flush=True)
stubborn = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
stubborn.stdout.readline()
print(stubborn.pid, flush=True)
if (forked := os.fork()) == 0:
    time.sleep(600)
print(forked, flush=True)
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def _lives(process: psutil.Process) -> bool:
    """A killed process whose new parent has not waited for it yet does not."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def sleepers() -> list[psutil.Process]:
    """Of this test."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("PYTHONPATH") == os.environ["PYTHONPATH"]
            if mine and "sleeps" in command_line(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
