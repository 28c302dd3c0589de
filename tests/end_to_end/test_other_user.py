"""What another user of the same machine can do to a default `trireme run` and a default `trireme up`:
everything is tried, and nothing may work."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.command import Command, command_in, wait_for_step
from tests.end_to_end.other_user import GOT
from tests.end_to_end.scripts import HEAD, UNHURRIED_LOSS, write_script
from tests.equipment.command_lines import command_line

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ATTACKER = Path(__file__).with_name("other_user.py")
SCHEMA = Path(__file__).parents[2] / "openapi.json"
OPEN_ROUTES = {"/healthz", "/readyz"}
EVENTS = [
    ("GET", path)
    for path in ("/v1/jobs/a/events/stream", "/v1/job/events/stream", "/v1/cluster/events/stream")
]
FEW = ("--trainers", 1, "--pservers", 1, "--epochs", 2000)
PLACES = (
    "--trainers",
    3,
    "--pservers",
    2,
    "--standbys",
    1,
)  # one trainer works, one runs a task; one of each kind is idle
SECRETS = re.compile("TOKEN|PASSWORD|SECRET")
SHARED = Path("/dev/shm")
LIMIT_S = 90.0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can enter, as a home may be; pytest's own are closed. tmp/ is what /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="trireme-test-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def told_of(family: list[psutil.Process], folder: Path) -> dict[str, Any]:
    """What there is to attack. Root sees all of it."""
    connections = [each for process in family for each in process.net_connections("all")]
    paths = [folder / ".trireme", *(folder / ".trireme").rglob("*"), *(folder / "tmp").rglob("*")]
    # etcd's library for logs binds a datagram socket without a name, to send from, and never reads it
    named = {
        each.laddr
        for each in connections
        if each.family == socket.AF_UNIX and each.type == socket.SOCK_STREAM
    }
    return {
        "pids": [process.pid for process in family],
        "ports": sorted(
            {
                each.laddr.port
                for each in connections
                if each.status == psutil.CONN_LISTEN and each.family != socket.AF_UNIX
            }
        ),
        "routes": EVENTS
        + [
            (method.upper(), re.sub(r"\{job\}", "a", path).replace("{", "").replace("}", ""))
            for path, operations in json.loads(SCHEMA.read_text())["paths"].items()
            for method in operations
            if path not in OPEN_ROUTES
        ],
        "sockets": sorted(
            {name for name in named if name.startswith(("/", "@"))}
            | {str(path) for path in paths if path.is_socket()}
        ),
        "files": sorted(str(path) for path in paths if path.is_file()),
        "folders": sorted(str(path) for path in paths if path.is_dir()),
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


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s until {what}"
        time.sleep(0.05)


def submit_to_cluster(trireme: Command, script: Path) -> None:
    """Job a trains; a task of job b runs on a place, and b waits for it."""
    folder = trireme.folder / ".trireme" / "_cluster"
    until("the cluster has a leader", (folder / "cluster.json").exists)
    one = ("--max-trainers", 1, "--pservers", 1, "--epochs", 2000)
    task = f"touch {trireme.folder}/task-runs; exec sleep 600"
    for arguments in (("--name", "a", *one), ("--name", "b", "--no-check", "--pre-task", task, *one)):
        submitted = trireme.run("submit", script, *arguments)
        assert submitted.code == 0, submitted
    until("the task of job b runs", (trireme.folder / "task-runs").exists)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.soak
def test_another_user_reads_changes_and_kills_nothing_of_a_run_and_of_a_cluster(open_folder: Path) -> None:
    script = write_script(open_folder, head=f"{HEAD}\nimport beside\n", loss=UNHURRIED_LOSS)
    (open_folder / "beside.py").write_text("SENT = 'with the script'\n")
    place, before = open_folder / ".trireme", sorted(map(str, SHARED.iterdir()))
    with command_in(open_folder) as trireme:
        trireme.environment["TMPDIR"] = str(open_folder / "tmp")
        said = {name: (open_folder / f"{name}.log").open("w+") for name in ("up", "run")}
        running = [
            trireme.start("up", *PLACES, stderr_to=said["up"]),
            trireme.start("run", script, *FEW, "--json", stderr_to=said["run"]),
        ]
        try:
            submit_to_cluster(trireme, script)
            steps = {job: wait_for_step(trireme, 2, job=job) for job in ("script", "a")}
            until("the run has a checkpoint", lambda: list((place / "script").rglob("manifest-*")))
            until("job a has a checkpoint", lambda: list((place / "_cluster").rglob("manifest-*")))
            family = trireme.family()
            told = told_of(family, open_folder) | {"shared_before": before}
            specs = {path: path.read_bytes() for path in place.rglob("spec.json")}
            tried = attack(told)
            check_that_there_was_something_to_attack(told, tried, open_folder)
            sys.stdout.write(f"{kinds(tried)}\n")  # the list of what was tried, with results
            got_in = {what: outcome for what, outcome in tried.items() if GOT in outcome}
            assert not got_in, json.dumps(got_in, indent=1)
            check_that_secrets_are_told_nowhere(family, place)
            assert {process.pid for process in family} <= {process.pid for process in trireme.family()}, (
                "all are alive"
            )
            assert {path: path.read_bytes() for path in place.rglob("spec.json")} == specs
            for job, step in steps.items():
                wait_for_step(trireme, step + 2, job=job)
        finally:
            for process in running:
                process.send_signal(signal.SIGINT)
            for process, log in zip(running, said.values(), strict=True):
                trireme.end_of(process)
                log.seek(0)
                sys.stdout.write(log.read())
                log.close()
        assert running[0].returncode == 0, "`trireme up` ended in order"


def check_that_there_was_something_to_attack(
    told: dict[str, Any], tried: dict[str, str], folder: Path
) -> None:
    """The attacker gets in where all may enter, and each kind of thing was there."""
    commands = [command_line(psutil.Process(pid)) for pid in told["pids"]]
    for word in (
        "trireme up",
        "trireme run",
        "master_service",
        "trireme.host",
        "[trainer-",
        "[pserver-",
        "sleep 600",
        "etcd ",
    ):
        assert any(word in command for command in commands), (word, commands)
    assert len(told["ports"]) >= 7, (
        "two masters and a member of each kind of the cluster; a master and two members of the run"
    )
    assert len(told["sockets"]) >= 6, "two of each etcd, one of each parameter server"
    names = {Path(path).name for path in told["files"]}
    assert {
        "spec.json",
        "trainer-0.log",
        "lock",
        "cluster.json",
        "cluster.lock",
        "agent.json",
        "script.py",
        "beside.py",
    } <= names
    assert len(tried) > 1000
    path = folder / "open.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        open_things = {"sockets": [str(path)], "files": [str(folder / "script.py")]}
        nothing: dict[str, Any] = {
            "pids": [],
            "ports": [],
            "folders": [],
            "shared_before": told["shared_before"],
        }
        outcomes = attack(nothing | open_things)
    assert [
        GOT in outcomes[f"{what}{place}"]
        for what, place in (("connect to the socket ", path), ("read ", folder / "script.py"))
    ] == [True, True]


def check_that_secrets_are_told_nowhere(family: list[psutil.Process], folder: Path) -> None:
    """Neither in command lines nor in logs, specs, checkpoints and etcd's data. Files of tokens are what they
    are for."""
    kept = [path.read_text().strip() for path in folder.rglob("tokens/*")]
    secrets = {text for text in kept if text.startswith("trireme_")}
    assert len(secrets) == 6, "one for each role, of the run and of the cluster"
    for process in family:
        with contextlib.suppress(psutil.Error):
            given = process.environ().items()
            secrets |= {
                value for name, value in given if SECRETS.search(name) and len(value) > 8 and "/" not in value
            }
    for process in family:
        shown = command_line(process)
        assert not [secret for secret in secrets if secret in shown], shown
    searched = Counter[str]()
    for path in folder.rglob("*"):
        if path.parent.name != "tokens" and (content := content_of(path)) is not None:
            searched[re.split("[-.]", path.name)[0]] += 1
            assert not [secret for secret in secrets if secret.encode() in content], path
    assert {"manifest", "trainer", "master", "etcd", "spec", "db", "host", "pre"} <= searched.keys()


def content_of(path: Path) -> bytes | None:
    """None: no file, or one that was removed meanwhile, as old checkpoints are."""
    try:
        return path.read_bytes() if path.is_file() else None
    except FileNotFoundError:
        return None
