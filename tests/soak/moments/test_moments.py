"""Trainers of a collective job break at exact moments, one of each operation and kind, then some that are
drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(900)]
EACH = (
    "1:10:push:during:kill,2:16:pull:before:stop,0:22:step:during:cut,3:26:push:before:size,"
    "1:30:give:during:kill,2:36:join:during:kill,3:40:form:during:lost,0:46:pull:during:delay"
)


@pytest.mark.parametrize(
    "options", [["--faults", EACH], ["--faults", EACH, "--transport", "tcp"], ["--seed", "1", "2"]]
)
def test_faults_at_exact_moments_change_no_bit(options):
    command = [sys.executable, "-m", "tests.soak.moments", *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], text=True, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0, done.stdout
