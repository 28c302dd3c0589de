"""The temporary folder of a run: its path is long, or somebody cleans it while the run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import wait_for_step
from tests.end_to_end.scripts import SLOWABLE_LOSS, write_script
from trireme.view.child_events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
WAIT_S = 90.0
LONG_BYTES = 70  # so a socket's path would have more than 107 bytes, and that of etcd's fewer


@pytest.fixture
def place() -> Iterator[Path]:
    """Short, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def restarted(folder: Path) -> list[str]:
    return [event["child"] for event in read_events(folder) if event["what"] == "restarted"]


def until_restarted(folder: Path, *children: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not set(children) <= set(restarted(folder)):
        assert time.monotonic() < deadline, read_events(folder)
        time.sleep(0.1)


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
def test_a_run_whose_sockets_are_deleted_goes_on_with_members_that_are_started_again(
    trireme, tmp_path, place, strategy
):
    script, folder = write_script(tmp_path, loss=SLOWABLE_LOSS), tmp_path / ".trireme" / "script"
    slow = tmp_path / "slow"
    slow.touch()
    process = trireme.begin(
        "run", script, "--epochs", 30, "--trainers", 2, "--strategy", strategy, TMPDIR=str(place)
    )
    wait_for_step(trireme, 1)
    first = {event["child"]: event["pid"] for event in read_events(folder)}
    for found in place.glob("trireme-*"):
        shutil.rmtree(found)
    until_restarted(folder, "etcd")
    victims = ["trainer-0", *(["pserver-0"] if strategy == "parameter_server" else [])]
    for name in victims:
        os.kill(first[name], signal.SIGKILL)
    until_restarted(folder, *victims)
    step = wait_for_step(trireme, 1)
    wait_for_step(trireme, step + 10)
    slow.unlink()
    done = trireme.end_of(process)
    assert done.code == 0, done.err
    assert "its socket in" in done.err
    assert not list(place.glob("trireme-*"))


def test_a_long_temporary_folder_gives_way_to_a_short_one_that_is_told(trireme, tmp_path, place):
    long = place / ("d" * (LONG_BYTES - len(str(place)) - 1))
    long.mkdir()
    done = trireme.run("run", write_script(tmp_path), TMPDIR=str(long), XDG_RUNTIME_DIR=str(place))
    assert done.code == 0, done.err
    assert f"UNIX sockets are made in {place}: the temporary folder {long} has a path of 70 bytes" in done.err
    logs = tmp_path / ".trireme" / "script" / "logs"
    assert any('"over": "unix"' in path.read_text() for path in logs.glob("trainer-*.log"))
