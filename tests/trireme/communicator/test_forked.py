"""A communicator in a process that was forked after it was made: no call waits there, and the parent stays a
member."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import trireme
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


def test_a_killed_member_is_left_out_at_once_though_a_process_that_it_forked_lives(etcd):
    """As those of torch's DataLoader do, for some seconds."""
    argv = [sys.executable, "-m", "tests.trireme.communicator.forked_members", etcd.url, "killed"]
    settings = {"timeout_s": 60.0, "lease_ttl_s": 20.0, "share_state": False}
    with (
        trireme.CollectiveCommunicator("killed", etcd.url, **settings) as one,
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as member,
    ):
        while one.size < 2:
            assert one.barrier()
        assert member.stdout is not None
        child = int(member.stdout.readline())
        member.wait(30)
        died = time.monotonic()
        try:
            while one.size > 1:
                assert one.barrier()
            seconds = time.monotonic() - died
        finally:
            os.kill(child, signal.SIGKILL)
    assert seconds < 5.0
