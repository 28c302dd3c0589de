"""What another user of the same machine can do to a default `trireme run`: everything is tried, and nothing may work."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.command import command_in, wait_for_step
from tests.end_to_end.other_user import GOT
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ATTACKER = Path(__file__).with_name("other_user.py")
FEW = ("--trainers", 1, "--pservers", 1, "--epochs", 2000)
SECRETS = re.compile("TOKEN|PASSWORD|SECRET")
SHARED = Path("/dev/shm")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can enter, as a home may be; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="trireme-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def told_of(family: list[psutil.Process], folder: Path) -> dict[str, Any]:
    """What there is to attack. Root sees all of it."""
    connections = [each for process in family for each in process.net_connections("all")]
    paths = [*folder.rglob("*"), *(each.resolve() for each in folder.rglob("sockets"))]
    places = {path for path in paths if path.is_dir()} | {folder}
    temporary = [entry for place in places if not place.is_relative_to(folder) for entry in place.rglob("*")]
    # etcd's library for logs binds a datagram socket without a name, to send from, and never reads it
    named = {each.laddr for each in connections if each.family == socket.AF_UNIX and each.type == socket.SOCK_STREAM}
    return {
        "pids": [process.pid for process in family],
        "ports": sorted(
            {
                each.laddr.port
                for each in connections
                if each.status == psutil.CONN_LISTEN and each.family != socket.AF_UNIX
            }
        ),
        "sockets": sorted(
            {name for name in named if name.startswith(("/", "@"))}
            | {str(path) for path in [*paths, *temporary] if path.is_socket()}
        ),
        "files": sorted(str(path) for path in [*paths, *temporary] if path.is_file()),
        "folders": sorted(map(str, places)),
    }


def attack(told: dict[str, Any]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-P", str(ATTACKER)],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,  # within a session everybody may send SIGCONT
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def kinds(tried: dict[str, str]) -> str:
    """One line for each kind of attempt, with its result."""
    counts = Counter(
        (re.sub(r"\d{2,}|\d(?= of)", "N", what.partition(" /tmp/")[0]), outcome.partition(":")[0])
        for what, outcome in tried.items()
    )
    return "\n".join(f"{count:4} x {what}: {outcome}" for (what, outcome), count in sorted(counts.items()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_changes_and_kills_nothing_of_a_run(open_folder: Path) -> None:
    script = write_script(open_folder, loss=UNHURRIED_LOSS)
    before = sorted(map(str, SHARED.iterdir()))
    with command_in(open_folder) as trireme:
        running = trireme.start("run", script, *FEW, "--json")
        try:
            step = wait_for_step(trireme, 2)
            while not list(open_folder.rglob("manifest-*")):  # of the first checkpoint; the test has a time limit
                time.sleep(0.05)
            family = trireme.family()
            told = told_of(family, open_folder / ".trireme") | {"shared_before": before}
            spec = (open_folder / ".trireme" / "script" / "spec.json").read_bytes()
            tried = attack(told)
            check_that_there_was_something_to_attack(told, tried, open_folder)
            sys.stdout.write(f"{kinds(tried)}\n")  # the list of what was tried, with results
            got_in = {what: outcome for what, outcome in tried.items() if GOT in outcome}
            assert not got_in, json.dumps(got_in, indent=1)
            check_that_secrets_are_told_nowhere(family, open_folder / ".trireme")
            assert {process.pid for process in family} <= {process.pid for process in trireme.family()}, "all are alive"
            assert (open_folder / ".trireme" / "script" / "spec.json").read_bytes() == spec
            wait_for_step(trireme, step + 2)
        finally:
            running.send_signal(signal.SIGINT)
            trireme.end_of(running)


def check_that_there_was_something_to_attack(told: dict[str, Any], tried: dict[str, str], folder: Path) -> None:
    """The attacker gets in where all may enter, and each kind of thing was there."""
    assert len(told["ports"]) >= 3, "of the master, the parameter server and the trainer"
    assert len(told["sockets"]) >= 3, "two of etcd, one of the parameter server"
    assert {"spec.json", "trainer-0.log", "lock"} <= {Path(path).name for path in told["files"]}
    assert len(tried) > 300
    path = folder / "open.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        open_things = {"sockets": [str(path)], "files": [str(folder / "script.py")]}
        nothing: dict[str, Any] = {"pids": [], "ports": [], "folders": [], "shared_before": told["shared_before"]}
        outcomes = attack(nothing | open_things)
    assert [
        GOT in outcomes[f"{what}{place}"]
        for what, place in (("connect to the socket ", path), ("read ", folder / "script.py"))
    ] == [True, True]


def check_that_secrets_are_told_nowhere(family: list[psutil.Process], folder: Path) -> None:
    """Neither in command lines nor in logs, specs, checkpoints and etcd's data. Files of tokens are what they are for."""
    kept = [path.read_text().strip() for path in folder.rglob("tokens/*")]
    secrets = {text for text in kept if text.startswith("trireme_")}
    assert len(secrets) == 3, "one for each role"
    for process in family:
        with contextlib.suppress(psutil.Error):
            given = process.environ().items()
            secrets |= {value for name, value in given if SECRETS.search(name) and len(value) > 8 and "/" not in value}
    for process in family:
        shown = " ".join(process.cmdline())
        assert not [secret for secret in secrets if secret in shown], shown
    searched = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tokens"]
    assert {"manifest", "trainer", "master", "etcd", "spec", "db"} <= {
        re.split("[-.]", path.name)[0] for path in searched
    }
    for path in searched:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], path
