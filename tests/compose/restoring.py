"""A parameter server that loads a checkpoint is live and not ready, its container is healthy, and nothing is
restarted.

The manifest of the job's only checkpoint becomes a named pipe: who opens it waits, as at a storage that does
not answer, for as long as the test wants.
"""

from __future__ import annotations

import json

from tests.compose.engine import run
from tests.compose.project import DIGITS, Project, names, step_of, until
from tests.soak.run import SoakError
from trireme.client import Client, Standing

JOB = "restoring"
FOLDER = f"/storage/jobs/{JOB}/checkpoints"
LIMIT_S = 300
# the checkpoint of the initial parameters stays the only one
SETTINGS = ("checkpoint_every_epochs=1000000", "checkpoint_every_seconds=86400")
LOADS = {"live": True, "ready": False, "reason": "loads a checkpoint"}

HOLD = """
import os, pathlib, sys
for path in pathlib.Path(sys.argv[1]).glob("*/manifest-*.json"):
    kept, pipe = path.with_name("kept-" + path.name), path.with_name("pipe-" + path.name)
    os.mkfifo(pipe)
    os.link(path, kept)
    pipe.rename(path)
    os.link(path, pipe)
    print(path)
"""
LET_GO = """
import os, pathlib, sys
for kept in pathlib.Path(sys.argv[1]).glob("*/kept-*"):
    path = kept.with_name(kept.name.removeprefix("kept-"))
    pipe = path.with_name("pipe-" + path.name)
    kept.rename(path)
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # fails if nobody waits there
    pipe.unlink()
"""


def restoring_is_seen(project: Project, client: Client) -> str:
    """What was seen, for the log of the test."""
    settings = [part for each in SETTINGS for part in ("--set", each)]
    project.cli("submit", DIGITS, "--name", JOB, "--epochs", "1000000", "--pservers", "1", *settings)
    until("a step", lambda: step_of(client, JOB), LIMIT_S)
    [held] = project.cli("python", "-c", HOLD, FOLDER).split()
    [killed] = [each for each in names(project.containers("pserver")) if _processes(each)]
    project.kill(killed)

    def loading() -> str:
        found = [each for each in names(project.containers("pserver")) if LOADS in _processes(each).values()]
        return found[0] if found else ""

    name = until("a parameter server that loads, live and not ready", loading, LIMIT_S)
    before = _started(project, name)
    until(f"{name} to be healthy", lambda: project.health("pserver").get(name) == "healthy", LIMIT_S)
    if LOADS not in _processes(name).values():
        msg = f"{name} does not load any more, though {held} cannot be read: {_processes(name)}"
        raise SoakError(msg)
    project.cli("python", "-c", LET_GO, FOLDER)
    ready = {"live": True, "ready": True}
    until("it to be ready", lambda: ready in _processes(name).values(), LIMIT_S)
    since = step_of(client, JOB)
    until("steps afterwards", lambda: step_of(client, JOB) > since, LIMIT_S)
    if _started(project, name) != before:
        msg = f"{name} was restarted while it loaded"
        raise SoakError(msg)
    client.cancel_job(JOB)
    until("the job's end", lambda: client.get_job(JOB).standing == Standing.CANCELLED, LIMIT_S)
    project.up()
    return f"{name}: its parameter server was live and not ready ({LOADS['reason']}), then ready"


def _processes(container: str) -> dict[str, dict[str, object]]:
    """What the health check says in the container of the processes of its places."""
    found: dict[str, dict[str, object]] = json.loads(run(["docker", "exec", container, "healthcheck.py"]))[
        "processes"
    ]
    return found


def _started(project: Project, name: str) -> str:
    [found] = [each for each in project.containers("pserver") if each["Name"].strip("/") == name]
    return str(found["State"]["StartedAt"])
