"""Each entrance finds the user's modules whatever their names are: those of our packages, of dependencies, of
the standard library's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.end_to_end.cluster_command import answered, good, job_when, up
from tests.end_to_end.command import Command
from tests.equipment.forked import clean_environment
from tests.equipment.notebooks import execute
from tests.equipment.users_modules import FUNCTIONS, NAMES, OWN_LOOP, write_users_modules

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


@pytest.mark.parametrize("functions", [FUNCTIONS, OWN_LOOP], ids=["functions", "own_loop"])
def test_submit(trireme: Command, tmp_path: Path, functions: str) -> None:
    script = script_of(tmp_path, functions)
    with up(trireme, *SETTINGS):
        good(answered(trireme, "submit", script, "--name", "a", "--epochs", 1, "--json"))
        job = job_when(trireme, "a", lambda job: job["standing"] in ("COMPLETED", "FAILED"))
    assert job["standing"] == "COMPLETED", job


LOOK = f"""
import {", ".join(NAMES)}
print({{name: getattr(module, "MINE", None) for name, module in list(globals().items()) if name in {NAMES}}})
"""
RUN = """
run = trireme.run("train.py", trainers=1, pservers=1, epochs=1, progress=False)
print(run.wait().phase)
import trireme.client
print(run.metrics("loss", by="epoch")["epoch"])
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "cells", [("import trireme", LOOK, RUN), (LOOK, "import trireme", RUN)], ids=["after", "before"]
)
async def test_a_notebook(trireme: Command, tmp_path: Path, cells: tuple[str, ...]) -> None:
    """What a cell imports is what it would be without Trireme: a kernel has imported `queue`, say, before it
    runs a cell."""
    folder = script_of(tmp_path, FUNCTIONS).parent
    alone, ours = (notebook_of(*text) for text in ((LOOK,), cells))
    [expected] = await execute(alone, folder, tmp_path / "home", trireme.mark)
    assert expected.count("user's") >= 5, expected
    shown = await execute(ours, folder, tmp_path / "home", trireme.mark)
    assert shown[cells.index(LOOK)] == expected
    assert shown[-1] == "COMPLETED\n[1]\n"


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])


@pytest.mark.parametrize("words", [(), ("-P", "-m", "trireme", "run")], ids=["python", "run"])
def test_where_python_itself_cannot_start(tmp_path: Path, words: tuple[str, ...]) -> None:
    """`types` is the first that it imports, before it reads which program to run."""
    script = script_of(tmp_path, FUNCTIONS)
    environment = clean_environment() | {"PYTHONPATH": str(script.parent)}
    nothing, ours = (
        subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=50,
            env=environment,
            check=False,
        )
        for command in (("-c", "pass"), (*words, str(script)))
    )
    assert "types.py" in nothing.stderr
    assert (ours.returncode, ours.stderr) == (nothing.returncode, nothing.stderr)
