"""`trireme run` answers before its imports, which take a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = """
import sys

class Imports:
    def find_spec(self, name, path, target=None):
        if name in ("torch", "trireme_shared.protocol.records"):
            print(f"imports {name}", file=sys.stderr)

sys.meta_path.insert(0, Imports())
from trireme.cli.app import main
main()
"""


def test_the_first_line_says_what_is_checked_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-c", WATCHED, "run", "script.py", "--lanes", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    assert lines[0] == "checking script.py"
    assert "imports trireme_shared.protocol.records" in lines
    assert done.returncode == 2, "the wrong flag is told afterwards"
    assert done.stdout == ""


# a wrong flag; no cluster is there
@pytest.mark.parametrize(("command", "code"), [("run", 2), ("submit", 3)])
def test_without_the_check_nothing_is_said_to_be_checked(tmp_path, command, code):
    (tmp_path / "script.py").touch()
    words = [sys.executable, "-m", "trireme", command, "script.py", "--no-check", "--lanes", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stderr.startswith("error: ")


def test_a_script_that_does_not_exist_is_not_checked(tmp_path):
    command = [sys.executable, "-m", "trireme", "run", "nowhere.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()[0][:26]) == (2, "error: nowhere.py does not")
