"""A user's modules may have any name: those of our packages, of a dependency, of the standard library. They
are found as in plain Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equipment.forked import clean_environment
from tests.equipment.users_modules import FUNCTIONS, NAMES, OWN_LOOP, write_users_modules
from trainer_agent.script.user_module import load
from trireme.script_source import digests_of, read_source


def test_a_process_of_ours_that_loads_a_script_gives_it_its_own_modules(tmp_path: Path) -> None:
    import queue

    script = write_users_modules(tmp_path, functions=FUNCTIONS)
    user = load(script)
    module = sys.modules[user.call("model").__class__.__module__.partition(".")[0]]
    assert module.__name__ == "torch"
    found = sys.modules["train"].FOUND
    assert set(found.values()) == {"user's"}, found
    assert found.keys() == {*NAMES, "inner", "sub", "helper"}
    assert sys.modules["queue"] is queue, "libraries keep theirs"
    assert sys.modules["master_service"].__file__ != str(tmp_path / "master_service.py")


def test_what_is_sent_is_what_the_script_imports_whatever_its_name(tmp_path: Path) -> None:
    script = write_users_modules(tmp_path)
    own = {f"{name}.py" for name in NAMES[:-1]} | {"helper.py"}
    own |= {f"trireme_shared_is_mine/{name}.py" for name in ("__init__", "inner", "sub")}
    assert read_source(script).modules.keys() == own
    assert digests_of(script).keys() == {"train.py", *own}


TRAINS = '\nif __name__ == "__main__":\n    trireme.train(__name__)\n'
OURS_ALONE = ("shared", "tests", "records", "master_service", "trireme_shared_is_mine")
"""Without `platform`, `queue` and `types`, with which plain Python cannot import torch."""


def run_alone(script: Path) -> subprocess.CompletedProcess[str]:
    """`python script.py`."""
    command = [sys.executable, str(script)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=clean_environment(), check=False
    )


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("early", [True, False])
def test_plain_python_finds_the_users_module_and_we_find_ours(tmp_path: Path, early: bool) -> None:
    tail = "import trireme.plain, json\nfrom master_service import MINE\nprint(json.dumps([FOUND, MINE]))\n"
    script = write_users_modules(tmp_path, OURS_ALONE, tail)
    if not early:
        script.write_text("import trireme\n" + script.read_text())
    done = run_alone(script)
    assert done.returncode == 0, done.stderr
    found, mine = json.loads(done.stdout)
    assert {*found.values(), mine} == {"user's"}


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("functions", [FUNCTIONS + TRAINS, OWN_LOOP], ids=["functions", "own_loop"])
def test_a_script_trains_under_plain_python_with_the_users_modules(tmp_path: Path, functions: str) -> None:
    done = run_alone(
        write_users_modules(tmp_path, OURS_ALONE, functions + "\nimport json\nprint(json.dumps(FOUND))\n")
    )
    assert done.returncode == 0, done.stderr
    assert "32/32 records" in done.stderr
    assert {*json.loads(done.stdout.splitlines()[-1]).values()} == {"user's"}


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["platform", "queue"])
def test_where_plain_python_cannot_import_torch_the_error_is_the_same(tmp_path: Path, name: str) -> None:
    script = write_users_modules(tmp_path, (name, "shared", "trireme_shared_is_mine"), FUNCTIONS + TRAINS)
    (tmp_path / "plain.py").write_text("import numpy\nimport torch\n")
    plain, ours = run_alone(tmp_path / "plain.py"), run_alone(script)
    assert plain.returncode == ours.returncode == 1
    assert ours.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert name in plain.stderr.splitlines()[-1]
