"""A quiet watch is not a broken one: against a cluster of three with default settings, which notifies of
progress every ten minutes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, aclosing

import pytest
import pytest_asyncio
import structlog

from tests.equipment.stopping import stop
from tests.equipment.waiting import until
from tests.shared.platform.etcd.test_endpoints import etcd_process
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import free_ports
from trireme_shared.platform.etcd.etcd3_transport import PROBE_S, QUIET_S, RawClient
from trireme_shared.platform.etcd.operations import STATUS

WATCHES = 5


class Cluster:
    """Three members, and a client with some watches; `seen`: (watch, value) of each event."""

    def __init__(self, urls, processes):
        self.urls, self.processes = urls, processes
        self.client: Etcd = connect(urls)
        self.seen: list[tuple[int, bytes]] = []
        self.following: set[int] = set()

    async def follow(self, number):
        async with aclosing(self.client.watch(f"/{number}/", prefix=True)) as batches:
            async for batch in batches:
                self.following.add(number)  # from its first reading on it sees each event
                self.seen += [(number, event.kv.value) for event in batch.events]

    async def put_into_each(self, value):
        """Until every watch has seen it."""
        async with asyncio.timeout(20):
            for number in range(WATCHES):
                await self.client.put(f"/{number}/a", value)
            while not {(number, value) for number in range(WATCHES)} <= set(self.seen):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def cluster(tmp_path):
    ports = free_ports(6)
    members = [
        (f"n{i}", f"http://127.0.0.1:{ports[i]}", f"http://127.0.0.1:{ports[3 + i]}") for i in range(3)
    ]
    whole = ",".join(f"{name}={peer}" for name, _, peer in members)
    async with AsyncExitStack() as stack:
        starts = [
            etcd_process(tmp_path, name, url, peer, whole, progress_s=None) for name, url, peer in members
        ]
        processes = [await stack.enter_async_context(start) for start in starts]
        cluster = Cluster([url for _, url, _ in members], processes)
        stack.push_async_callback(cluster.client.close)
        await cluster.client.get("/ready", timeout_s=20)
        following = [asyncio.ensure_future(cluster.follow(number)) for number in range(WATCHES)]
        await until(lambda: len(cluster.following) == WATCHES, "every watch to be open")
        yield cluster
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


@pytest.fixture
def logged():
    with structlog.testing.capture_logs() as entries:
        yield entries


async def test_quiet_watches_stay_open_and_a_frozen_member_is_left_all_the_same(cluster, logged, monkeypatch):
    asked: Counter[str] = Counter()
    post = RawClient.call_rpc

    def counted(client, method, *arguments, **options):
        asked[method] += 1
        return post(client, method, *arguments, **options)

    monkeypatch.setattr(RawClient, "call_rpc", counted)
    await cluster.put_into_each(b"1")
    asked.clear()
    await asyncio.sleep(2 * QUIET_S + 1.0)
    assert [entry for entry in logged if entry["event"] == "watch_broken"] == []
    assert (asked.keys(), asked[STATUS] <= 3) == ({STATUS}, True), (
        "one probe at a time for all watches, and nothing else"
    )
    assert sum(entry["event"] == "watches_are_quiet" for entry in logged) == 1
    stop(cluster.processes[cluster.client.transport.current].pid)
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(QUIET_S + PROBE_S + 1.5):
        while sum(entry["event"] == "watch_resumed" for entry in logged) < WATCHES:
            await asyncio.sleep(0.02)
    assert asyncio.get_running_loop().time() - begun > 1.0, "by its silence"
    await cluster.put_into_each(b"2")
    assert sorted(cluster.seen) == [(number, value) for number in range(WATCHES) for value in (b"1", b"2")]


OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net")


def may_drop_packets() -> bool:
    if shutil.which("unshare") is None or shutil.which("iptables") is None:
        return False
    return subprocess.run([*OWN_NETWORK, "iptables", "-L"], capture_output=True, timeout=20).returncode == 0


def test_a_connection_that_is_dead_without_a_word_is_noticed_though_others_work(tmp_path):
    if not may_drop_packets():
        pytest.skip("needs network namespaces and iptables")
    command = [
        *OWN_NETWORK,
        sys.executable,
        "-m",
        "tests.shared.platform.etcd.dead_connection",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "noticed after" in done.stdout, done.stdout + done.stderr
