"""A communicator in a process that was forked after it was made: no call waits there, and the parent stays a member."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trireme.communicator.forked_members import CALLS
from tests.trireme.communicator.test_communicator import etcd

__all__ = ["etcd"]
pytestmark = [pytest.mark.processes]


def test_a_forked_process_is_told_to_make_its_own_and_the_parent_goes_on(etcd):
    argv = [sys.executable, "-m", "tests.trireme.communicator.forked_members", etcd.url]
    printed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["ended"], f"it was still there after {found['seconds']:.0f} s"
    told = json.loads(found["told"])
    assert set(told) == set(CALLS)
    for text in told.values():
        assert f"made in process {found['process']}" in text
        assert f"process {found['child']} was forked from it: make another one in this process" in text
    assert found["sums"] == [[2.0, 2.0]] * 2
    assert found["epochs"] == 0
