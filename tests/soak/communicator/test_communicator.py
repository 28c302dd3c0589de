"""Communicators in real processes under faults at random places; the example's loop; 200 groups one after the
other."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

import trireme
from tests.soak.communicator.run import Soak
from tests.soak.moments.schedule import drawn, parse
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.protocol.keys import Keys

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "own_allreduce" / "start.py"


@pytest.mark.parametrize("seed", range(5))
async def test_members_agree_under_random_faults(seed):
    faults = drawn(seed, 4, 12)
    environment = {"REDUCTION": "canonical" if seed % 2 else "native"}
    receipt = await Soak(4, faults[-1].step + 20, faults, environment, whole=True).run()
    assert receipt.faults >= 12
    assert max(receipt.recoveries.get("kill", [0.0])) < 3.0


async def test_a_member_that_dies_while_others_recover():
    text = (
        "0:30:allreduce:during:kill,1:31:allreduce:before:kill,2:31:allreduce:during:cut,"
        "3:45:allreduce:after:stop"
    )
    receipt = await Soak(4, 80, parse(text)).run()
    assert receipt.faults == 4


def accuracies(*arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"accuracy (\S+) after", done.stdout)]


def test_the_example_trains_to_the_same_accuracy_with_members_killed_frozen_and_joined():
    quiet = accuracies("--members", "3", "--steps", "600")
    faults = ["--join-at", "100", "--kill-at", "400", "--freeze-at", "800", "--thaw-at", "1500"]
    harmed = accuracies("--members", "3", "--steps", "4000", *faults)
    assert len(quiet) == 3
    assert len(harmed) == 3
    assert len(set(harmed)) == 1  # they have the same parameters
    assert min(quiet + harmed) > 0.95


async def test_two_hundred_groups_leave_nothing(tmp_path):
    """A member comes and goes a hundred times beside two that stay."""
    async with EmbeddedEtcd(tmp_path / "etcd", unsafe_no_fsync=True) as etcd:
        counts = await asyncio.to_thread(come_and_go, etcd.url, 100)
        client = EtcdAccess((etcd.url,)).connect()
        left = [kv.key for kv in (await client.range(Keys("leak").prefix, prefix=True)).kvs]
        await client.close()
    assert left == [Keys("leak").collective_epoch]
    early, late = counts[20], counts[-1]
    assert late["epoch"] - early["epoch"] > 150
    assert late["files"] <= early["files"] + 3
    assert late["threads"] <= early["threads"] + 2
    assert late["bytes"] <= early["bytes"] + (24 << 20)
    assert late["keys"] <= early["keys"] + 2


def come_and_go(url: str, times: int) -> list[dict[str, int]]:
    process, counts = psutil.Process(), []
    stay = [trireme.CollectiveCommunicator("leak", url, share_state=False) for _ in range(2)]
    over, whole = threading.Event(), threading.Semaphore(0)

    def work(one) -> None:
        before = 0
        while not over.is_set():
            status, _ = one.allreduce(torch.ones(100_000))
            assert status
            if one.rank == 0 and one.size != before:
                before = one.size
                whole.release()

    async def keys() -> int:
        client = EtcdAccess((url,)).connect()
        try:
            return (await client.range(Keys("leak").prefix, prefix=True, count_only=True)).count
        finally:
            await client.close()

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, one) for one in stay]
        for _ in range(times):
            with trireme.CollectiveCommunicator("leak", url, share_state=False) as guest:
                while not (guest.allreduce(torch.ones(100_000))[0] and guest.size == 3):
                    pass
            while guest.epoch >= stay[0].epoch:  # until they are two again
                whole.acquire(timeout=0.02)
            gc.collect()
            counts.append(
                {
                    "epoch": len(counts) * 2,
                    "files": len(os.listdir("/dev/fd")),  # noqa: PTH208
                    "threads": threading.active_count(),
                    "bytes": process.memory_info().rss,
                    "keys": asyncio.run(keys()),
                }
            )
        over.set()
        stay[0].close()
        stay[1].close()
        for each in working:
            each.exception(30)
    return counts
