"""The launcher ends a child whose lease is gone; never because etcd itself is silent."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from shared.etcd import Etcd
from shared.keys import Keys
from shared.records import MasterLock, PserverMember, TrainerMember
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme.launch.leases import LostLeases

KEYS = Keys("ctr")
TTL_S = 5.0
PSERVER = PserverMember(index=0, url="u", incarnation="p", host="h", pid=20, lease=1)


def watched(script) -> list[tuple[str, float]]:
    """What was ended while `script(etcd, server)` ran, with the seconds since the last renewal. Children: one of each kind."""

    async def main() -> list[tuple[str, float]]:
        server = SimulatedEtcd()
        etcd, own = Etcd(server.transport("member")), Etcd(server.transport("launcher"))
        lost, ended = LostLeases(TTL_S), []
        alive = {"trainer-0": 10, "pserver-0": 20, "pserver-1": 21, "master-0": 30, "master-1": 31}

        def end(name: str) -> None:
            ended.append((name, round(lost.ended(alive.pop(name)))))

        following = asyncio.ensure_future(lost.follow(own, KEYS, lambda: dict(alive), end))
        await script(etcd, server)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        return ended

    rng = random.Random(7)
    return run_virtual(VirtualLoop(rng), main(), rng)


async def register(etcd: Etcd) -> None:
    trainer = TrainerMember(trainer="trainer-0-a", url="u", incarnation="a", host="h", pid=10, lease=1)
    await etcd.put(KEYS.trainer("trainer-0-a"), trainer.to_bytes())
    await etcd.put(KEYS.pserver(0), PSERVER.to_bytes())
    await etcd.put(KEYS.master_lock, MasterLock(master="master-0-c", url="u", lease=1).to_bytes())
    await asyncio.sleep(3)


def test_a_member_whose_key_stays_gone_is_ended_after_the_grace_and_a_spare_is_not():
    async def script(etcd, _):
        await register(etcd)
        await etcd.delete(KEYS.pserver(0))
        await asyncio.sleep(TTL_S - 1)
        await etcd.delete(KEYS.trainer("trainer-0-a"))
        await asyncio.sleep(60)

    ended = dict(watched(script))
    assert ended.keys() == {"pserver-0", "trainer-0"}
    assert all(2 * TTL_S < silent_s < 2 * TTL_S + 3 for silent_s in ended.values()), ended


def test_who_registers_again_in_time_is_left_alone():
    async def script(etcd, _):
        await register(etcd)
        for _ in range(5):
            await etcd.delete(KEYS.pserver(0))
            await asyncio.sleep(TTL_S - 1.5)
            await etcd.put(KEYS.pserver(0), PSERVER.to_bytes())
            await asyncio.sleep(2)

    assert watched(script) == []


def test_a_leader_without_successor_is_ended_and_one_that_another_replaced_is_not():
    async def script(etcd, _):
        await register(etcd)
        await etcd.put(KEYS.master_lock, MasterLock(master="master-1-d", url="u", lease=1).to_bytes())
        await asyncio.sleep(60)
        await etcd.delete(KEYS.master_lock)
        await asyncio.sleep(60)

    assert [name for name, _ in watched(script)] == ["master-1"]


def test_while_etcd_is_silent_nobody_is_ended():
    async def script(etcd, server):
        await register(etcd)
        await etcd.delete(KEYS.pserver(0))
        await asyncio.sleep(2)
        server.freeze()
        await asyncio.sleep(60)
        server.thaw()
        await asyncio.sleep(TTL_S - 1)
        await etcd.put(KEYS.pserver(0), PSERVER.to_bytes())
        await asyncio.sleep(10)

    assert watched(script) == []


def test_while_etcd_is_out_of_space_nobody_is_ended():
    async def script(etcd, server):
        await register(etcd)
        await etcd.delete(KEYS.pserver(0))
        server.store.out_of_space = True
        await asyncio.sleep(60)

    assert watched(script) == []
