"""What CI says of files and processes that the suite leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "left_behind"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


def said(folder: Path) -> tuple[int, str]:
    done = subprocess.run([SCRIPT, folder, "0"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_folders_of_pytest_and_the_empty_one_of_torchs_compiler_may_stay(tmp_path):
    (tmp_path / "pytest-of-me" / "pytest-0").mkdir(parents=True)
    (tmp_path / "torchinductor_me").mkdir()
    assert said(tmp_path) == (0, "")


def test_a_file_and_a_process_that_were_left_are_named(tmp_path):
    (tmp_path / "torchinductor_me").mkdir()
    (tmp_path / "torchinductor_me" / "compiled").touch()
    (tmp_path / "trireme-run-x").mkdir()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": str(tmp_path)}) as left:
        code, told = said(tmp_path)
        left.kill()
    assert code == 1
    lines = set(told.splitlines())
    assert {
        f"{tmp_path}/torchinductor_me",
        f"{tmp_path}/trireme-run-x",
        f"process {left.pid}: sleep 60 ",
    } <= lines
