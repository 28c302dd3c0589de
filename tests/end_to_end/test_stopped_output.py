"""Whoever reads the output of a command may stop, or end, at any time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.command import wait_for, wait_for_step
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from tests.equipment.forked import clean_environment
from trireme.view.child_events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
STOP_S = 60.0
WAIT_S = 60.0
SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python 3.11 does not name everywhere


@contextlib.contextmanager
def full_pipe():
    """Its writing end: nobody reads, and nothing more fits. As a terminal after Ctrl-S."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, SET_PIPE_SIZE, 4096)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def until_restarted(folder: Path, child: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(event["child"] == child and event["what"] == "restarted" for event in read_events(folder)):
        assert time.monotonic() < deadline, read_events(folder)
        time.sleep(0.1)


def pid_of(folder: Path, child: str) -> int:
    return int(next(event["pid"] for event in read_events(folder) if event["child"] == child))


def test_a_run_whose_output_nobody_reads_is_supervised_and_stops_in_order(trireme, tmp_path):
    script, folder = write_script(tmp_path, loss=UNHURRIED_LOSS), tmp_path / ".trireme" / "script"
    with full_pipe() as writing:
        process = trireme.start("run", script, "--epochs", 100_000, stderr_to=writing)
        wait_for_step(trireme, 1)
        os.kill(pid_of(folder, "pserver-0"), signal.SIGKILL)
        until_restarted(folder, "pserver-0")
        process.send_signal(signal.SIGTERM)
        try:
            out, _ = process.communicate(timeout=STOP_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert list((folder / "checkpoints").iterdir())


def test_a_reader_that_ends_does_not_end_the_run(trireme, tmp_path):
    process = trireme.start("run", write_script(tmp_path))
    wait_for(process, "master http")
    process.stderr.close()  # as `2>&1 | head -1`, or a `tee` that is killed
    process.stderr = None
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 0, out
    assert "COMPLETED" in out


def ran(*arguments: str, redirected: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a shell runs it."""
    command = f'exec "$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "trireme", *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize("redirected", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"), [(("version",), 0), (("list",), 0), (("status",), 3), (("run", "none.py"), 2)]
)
def test_what_is_closed_is_nowhere_and_changes_no_exit_code(tmp_path, arguments, code, redirected):
    done = ran(*arguments, redirected=redirected, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_run_with_closed_output_ends_as_any_other(trireme, tmp_path):
    script = write_script(tmp_path)
    done = ran("run", str(script), redirected="<&- >&- 2>&-", folder=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / ".trireme" / "script" / "result.json").is_file()


def test_an_answer_that_cannot_be_written_is_an_error(tmp_path):
    done = ran("version", redirected="> /dev/full", folder=tmp_path)
    told = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_the_locale_lacks_is_shown_by_number_and_hides_no_cause(tmp_path):
    (tmp_path / "train.py").write_text("import hilf\n")
    (tmp_path / "hilf.py").write_text('raise ImportError("die Größe fehlt →")\n')
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "trireme", "run", "train.py", "--json"],
        cwd=tmp_path,
        env=clean_environment() | locale,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert b"ImportError: die Gr\\xf6\\xdfe fehlt \\u2192" in done.stderr


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trireme", "version"],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
