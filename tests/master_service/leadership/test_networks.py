"""A loopback address means another process on every host: a port that is closed there proves nothing about a
process elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from master_service.leadership import election
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, leading, running, spec_of
from trireme_shared.platform.runtime.http import own_network, tells
from trireme_shared.protocol.errors import NotLeader
from trireme_shared.protocol.records import TrainerMember

LOOPBACK = "http://127.0.0.1:4100"


def on_host(cluster: MasterCluster, name: str, network: str) -> Master:
    """It advertises the same loopback address as every other."""
    etcd, options = cluster.etcd_of(name), cluster.master_options()
    return Master(etcd, KEYS, name=name, url=LOOPBACK, spec=cluster.spec, network=network, **options)


def test_masters_on_two_hosts_that_advertise_loopback_let_each_other_lead() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        cluster.dead.add(LOOPBACK)  # on the other host nothing listens there
        async with leading(on_host(cluster, "m1", "host-a")) as first:
            term, stopping = first.term, asyncio.Event()
            standby = on_host(cluster, "m2", "host-b")
            waiting = asyncio.ensure_future(standby.run(stopping))
            await asyncio.sleep(10)
            assert first.current_term is term
            assert standby.current_term is None
            stopping.set()
            await waiting

    run_virtually(main)


def test_without_the_look_at_networks_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation of the test above."""
    monkeypatch.setattr(election, "tells", lambda *_: True)
    with pytest.raises((AssertionError, NotLeader)):
        test_masters_on_two_hosts_that_advertise_loopback_let_each_other_lead()


def test_a_standby_of_the_same_network_finds_a_dead_leader_at_loopback() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        lost = asyncio.ensure_future(on_host(cluster, "m1", "host-a").run(asyncio.Event()))
        await asyncio.sleep(1)
        cluster.simulated.cut("m1")
        lost.cancel()
        await asyncio.wait([lost])
        cluster.dead.add(LOOPBACK)
        before = asyncio.get_running_loop().time()
        async with leading(on_host(cluster, "m2", "host-a")):
            assert asyncio.get_running_loop().time() - before < 1.0

    run_virtually(main)


@pytest.mark.parametrize(("network", "evicted"), [("another", False), (own_network(), True)])
def test_a_member_that_advertises_loopback_is_evicted_only_from_its_own_network(
    network: str, evicted: bool
) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            lease = (await cluster.etcd.grant(3600)).id
            named: dict[str, Any] = {"trainer": "t2", "incarnation": "t2", "host": "h", "pid": 2}
            member = TrainerMember(url="http://localhost:4200", lease=lease, network=network, **named)
            await cluster.etcd.put(KEYS.trainer("t2"), member.to_bytes(), lease)
            await until(lambda: "t2" in master.job.members.trainers, "t2 to be seen")
            cluster.dead.add(member.url)
            assert await master.report_suspect("t2") == evicted

    run_virtually(main)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "[::1]", "0.0.0.0", "a.localhost"])
def test_local_addresses_tell_something_in_their_own_network_only(host: str) -> None:
    assert tells(f"http://{host}:80", "a", "a")
    assert not tells(f"http://{host}:80", "b", "a")
    assert not tells(f"http://{host}:80", "", "a")


@pytest.mark.parametrize("host", ["10.0.0.1", "gpu-3", "[2001:db8::1]", "localhost.example"])
def test_other_addresses_tell_something_everywhere(host: str) -> None:
    assert tells(f"http://{host}:80", "b", "a")
