"""Each entrance finds the user's modules whatever their names are: those of our packages, of dependencies, of the standard library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.cluster_command import answered, good, job_when, up
from tests.end_to_end.command import Command
from tests.equipment.users_modules import FUNCTIONS, OWN_LOOP, write_users_modules

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
SETTINGS = ("--trainers", 1, "--pservers", 1)


def script_of(folder: Path, functions: str) -> Path:
    """It fails unless it found all of the user's modules."""
    (folder / "mine").mkdir()
    check = 'assert set(FOUND.values()) == {"user\'s"}, FOUND\n'
    return write_users_modules(folder / "mine", functions=check + functions)


@pytest.mark.parametrize("functions", [FUNCTIONS, OWN_LOOP], ids=["functions", "own_loop"])
def test_run(trireme: Command, tmp_path: Path, functions: str) -> None:
    done = trireme.run("run", script_of(tmp_path, functions), *SETTINGS, "--epochs", 1, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["phase"] == "COMPLETED"


def test_submit(trireme: Command, tmp_path: Path) -> None:
    script = script_of(tmp_path, FUNCTIONS)
    with up(trireme, *SETTINGS):
        good(answered(trireme, "submit", script, "--name", "a", "--epochs", 1, "--json"))
        job = job_when(trireme, "a", lambda job: job["standing"] in ("COMPLETED", "FAILED"))
    assert job["standing"] == "COMPLETED", job
