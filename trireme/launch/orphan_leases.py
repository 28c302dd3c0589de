"""Revoke the leases of processes that the launcher knows to be dead, so that no member waits until they expire."""

from __future__ import annotations

import asyncio

from shared.etcd import Etcd
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.records import MasterLock, PserverMember, TrainerMember

REVOKE_TIMEOUT_S = 2.0


async def revoke_leases_of(etcd: Etcd, keys: Keys, child: str, pid: int) -> None:
    """Of process `pid`, which was the child of that name. Raises TriremeError, TimeoutError: the leases then expire by themselves."""
    async with asyncio.timeout(REVOKE_TIMEOUT_S):
        for lease in await leases_of(etcd, keys, child, pid):
            await etcd.revoke(lease, timeout_s=REVOKE_TIMEOUT_S)


async def revoke_all_leases(etcd: Etcd, keys: Keys) -> None:
    """Of an earlier run's members. They died with their launcher, but etcd, started again on its old data, gives their
    leases their full time again. Raises PeerError."""
    found = await etcd.range(keys.prefix, prefix=True, keys_only=True)
    for lease in sorted({item.lease for item in found.kvs if item.lease}):
        await etcd.revoke(lease, timeout_s=REVOKE_TIMEOUT_S)


async def leases_of(etcd: Etcd, keys: Keys, child: str, pid: int) -> list[int]:
    """The leases of process `pid`, which was the child of that name (`trainer-0`, `pserver-1`, `master-0`). Raises PeerError.

    A record that cannot be read is skipped: its lease expires by itself.
    """
    role = child.partition("-")[0]
    if role == "trainer":
        found = await etcd.range(keys.trainers, prefix=True)
        trainers = [read_record(TrainerMember, kv.key, kv.value) for kv in found.kvs if keys.is_trainer(kv.key)]
        return [member.lease for member in trainers if member and member.pid == pid] + await _held_by(
            etcd, child, keys.sweep_lock
        )
    if role == "pserver":
        found = await etcd.range(keys.pservers, prefix=True)
        pservers = [read_record(PserverMember, kv.key, kv.value) for kv in found.kvs]
        return [member.lease for member in pservers if member and member.pid == pid]
    return await _held_by(etcd, child, keys.master_lock)


async def _held_by(etcd: Etcd, child: str, key: str) -> list[int]:
    """The lock's lease if the child holds the lock."""
    found = await etcd.get(key)
    holder = read_record(MasterLock, key, found.value if found else None)
    return [holder.lease] if holder is not None and holder.master.startswith(f"{child}-") else []
