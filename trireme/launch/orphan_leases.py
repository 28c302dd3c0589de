"""What a dead child of the launcher leaves in etcd: the leases that kept its keys alive."""

from __future__ import annotations

from shared.etcd import Etcd
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.records import MasterLock, PserverMember, TrainerMember


async def leases_of(etcd: Etcd, keys: Keys, child: str, pid: int) -> list[int]:
    """The leases of process `pid`, which was the child of that name (`trainer-0`, `pserver-1`, `master-0`). Raises PeerError.

    What cannot be read belongs to nobody that we know: its lease runs out by itself.
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
    """The lease of that lock if the child holds it."""
    found = await etcd.get(key)
    holder = read_record(MasterLock, key, found.value if found else None)
    return [holder.lease] if holder is not None and holder.master.startswith(f"{child}-") else []
