"""All members of a job have one hash seed, whoever starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.launch.processes import inherited_environment
from trireme_shared.platform.runtime.process_setup import hash_seed

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import os, sys
from trireme_shared.platform.runtime.process_setup import fix_hash_seed
fix_hash_seed()
print(os.getpid(), hash("near"), sys.argv[1:])
"""


@pytest.mark.parametrize(("own", "expected"), [({}, "0"), ("random", "0"), ("", "0"), ("7", "7")])
def test_a_number_of_the_users_own_is_kept(own, expected, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if own != {}:
        monkeypatch.setenv("PYTHONHASHSEED", own)
    assert hash_seed(os.environ) == expected
    assert inherited_environment()["PYTHONHASHSEED"] == expected


def test_a_member_without_a_launcher_begins_again_with_a_fixed_seed_as_the_same_process(tmp_path):
    program = tmp_path / "member.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    found = []
    for own in ({}, {}, {"PYTHONHASHSEED": "1"}):
        with subprocess.Popen(
            [sys.executable, str(program), "a b"],
            env=environment | {"PYTHONPATH": str(ROOT)} | own,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            pid, number, arguments = process.communicate(timeout=60)[0].strip().split(" ", 2)
            assert (int(pid), arguments) == (process.pid, "['a b']")
        found.append(number)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "path", ["trainer_agent/__main__.py", "master_service/__main__.py", "trireme/masterless.py"]
)
def test_programs_that_import_scripts_fix_it_first(path):
    assert 'if __name__ == "__main__":\n    fix_hash_seed()\n' in (ROOT / path).read_text()


def test_the_image_sets_it_so_that_no_member_begins_twice():
    assert "PYTHONHASHSEED=0" in (ROOT / "docker" / "Dockerfile").read_text()
