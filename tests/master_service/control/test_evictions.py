"""Only the master that holds the lock ends a registration, and only the one that it means."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, leading, running, spec_of
from trireme_shared.protocol.errors import NotLeader
from trireme_shared.protocol.records import PserverMember


async def pserver_of(cluster: MasterCluster) -> PserverMember | None:
    found = await cluster.etcd.get(KEYS.pserver(0))
    return PserverMember.model_validate_json(found.value) if found else None


@pytest.mark.parametrize("member", ["t1", "pserver-0"])
def test_a_master_that_lost_its_lock_evicts_nobody(member: str) -> None:
    """It believes in its lease (its clock stood still), while another one leads already."""

    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as old:
            cluster.dead |= {"http://t1", "http://pserver-0"}
            await cluster.etcd.delete(KEYS.master_lock)
            async with leading(cluster.master("m2")) as new:
                before = await cluster.etcd.range(KEYS.prefix, prefix=True)
                with pytest.raises(NotLeader):
                    await old.report_suspect(member)
                after = await cluster.etcd.range(KEYS.prefix, prefix=True)
                assert [kv.key for kv in after.kvs] == [kv.key for kv in before.kvs]
                assert await new.report_suspect(member)
                left = await cluster.etcd.range(
                    KEYS.trainers if member == "t1" else KEYS.pservers, prefix=True
                )
                assert left.kvs == ()

    run_virtually(main)


def test_a_registration_that_took_the_place_of_the_suspected_one_stays() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            suspect = await pserver_of(cluster)
            assert suspect is not None
            await cluster.lose("pserver-0")
            await cluster.add_pserver(0)
            successor = await pserver_of(cluster)
            assert not await master.evictions.end(suspect, "a test")
            await asyncio.sleep(1)
            assert await pserver_of(cluster) == successor != suspect

    run_virtually(main)


@pytest.mark.parametrize("lose", ["answer", "request"])
def test_an_eviction_whose_answer_is_lost_is_done_once_and_ends_the_lease(lose: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1", "t2") as master:
            held = cluster.leases["t1"]
            await cluster.etcd.put(KEYS.init_lock, b"t1", held)
            cluster.dead.add("http://t1")
            if lose == "answer":
                cluster.simulated.lose_answer(client="m1")
            else:
                cluster.simulated.lose_request(client="m1")
            assert await master.report_suspect("t1")
            await until(lambda: master.job.trainers.names == ("t2",), "t1 to be gone")
            assert await cluster.etcd.get(KEYS.init_lock) is None
            assert await cluster.etcd.time_to_live(held) == -1

    run_virtually(main)
