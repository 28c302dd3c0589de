"""trireme.run with real processes: none is left, however the process that called it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import trireme as package
from tests.end_to_end import scripts
from tests.end_to_end.command import Command
from tests.equipment.forked import MARK, clean_environment

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TWO_AT_ONCE = """
import asyncio, gc, threading, time, trireme
from trireme.launch.run_folder import is_running

runs = {}

def start(job):
    runs[job] = trireme.run("script.py", job=job, epochs=1000, trainers=1, pservers=1, check=False)

async def main():
    threads = [threading.Thread(target=start, args=(job,)) for job in ("dropped", "left")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted((run.job, run.folder.name) for run in runs.values()))
    folder, deadline = runs["dropped"].folder, time.monotonic() + 60
    del runs["dropped"]
    gc.collect()
    while is_running(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    print("dropped runs:", is_running(folder))

asyncio.run(main())
print("the end of the script")
"""
WAITS = """
import trireme
run = trireme.run("script.py", trainers=1, pservers=1, epochs=1000, check=False)
print(run.pid, flush=True)
run.wait()
"""


def program(trireme: Command, text: str) -> subprocess.Popen[str]:
    (trireme.folder / "program.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=trireme.folder,
        env=clean_environment() | {MARK: trireme.mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_runs_at_once_are_stopped_when_one_is_dropped_and_when_the_interpreter_ends(trireme):
    scripts.write_script(trireme.folder, loss=scripts.UNHURRIED_LOSS)
    with program(trireme, TWO_AT_ONCE) as process:
        out, err = process.communicate(timeout=150)
    assert (process.returncode, out.splitlines()) == (
        0,
        ["[('dropped', 'dropped'), ('left', 'left')]", "dropped runs: False", "the end of the script"],
    )
    for job in ("dropped", "left"):
        assert (
            f"job {job} is unfinished; resume it with: trireme.run('script.py', trainers=1, "
            f"pservers=1, job='{job}', epochs=1000)" in err
        )
    assert "Traceback" not in err
    # the fixture finds out whether a process is left


def test_nothing_is_left_when_the_process_is_killed(trireme):
    scripts.write_script(trireme.folder, loss=scripts.UNHURRIED_LOSS)
    with program(trireme, WAITS) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) in {each.pid for each in trireme.family()}
        process.kill()
    deadline = time.monotonic() + 10
    while trireme.family() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert trireme.family() == []


def test_a_script_that_fails_is_told_by_the_call_and_a_job_that_fails_by_waiting(
    trireme, monkeypatch, capsys
):
    monkeypatch.chdir(trireme.folder)
    monkeypatch.setenv(MARK, trireme.mark)
    script = scripts.write_script(
        trireme.folder, loss="def loss(model, batch):\n    raise ValueError('no loss')\n"
    )
    with pytest.raises(package.TriremeError, match=r"script\.py failed:\n(.*\n)*.*ValueError: no loss"):
        package.run(script, progress=False)
    assert not Path(".trireme/script").exists()
    with package.run(script, trainers=1, pservers=1, check=False, progress=False) as run:
        with pytest.raises(TimeoutError, match=r"job script has not ended within 0 s: it is STARTING"):
            run.wait(0)
        with pytest.raises(
            package.JobFailed, match=r"job script failed: (.*\n)*.*ValueError: no loss"
        ) as caught:
            run.wait(100)
    assert caught.value.__notes__ == [caught.value.hint]
    assert run.result is not None
    assert (run.result.phase, run.status().phase, repr(run)) == ("FAILED", "FAILED", "<Run script: FAILED>")
    assert "ValueError: no loss" in run.logs("trainer-0")
    with pytest.raises(package.TriremeError, match="job script has no state_dict of its model: it is FAILED"):
        run.load()
    assert capsys.readouterr() == ("", "")
