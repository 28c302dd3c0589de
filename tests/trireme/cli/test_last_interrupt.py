"""Ctrl-C while the interpreter frees what it has: there is nothing left to stop."""

from __future__ import annotations

import signal
import subprocess
import sys

ENDING = """
import atexit, os, signal, sys
from trireme.cli.app import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv[:] = ["trireme", "version", "--json"]
main()
"""


def test_an_interrupt_in_the_last_moments_prints_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.startswith("{")
    assert ended.stderr == ""
    assert ended.returncode == -signal.SIGINT
