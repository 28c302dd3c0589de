"""A launcher that saw its master die revokes the lease of its lock, and of no other's."""

from __future__ import annotations

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from trireme.launch.processes import revoke_lock_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.members import MasterLock

KEY = ClusterKeys().lock
URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("url", "network", "goes"),
    [
        (URL, own_network(), True),
        (URL, "another host/1", False),
        ("http://127.0.0.1:8001", own_network(), False),
    ],
    ids=["its own", "another host's of that address", "another cluster's here"],
)
def test_the_lock_of_a_master_that_died_is_given_back_and_no_other(
    url: str, network: str, goes: bool
) -> None:
    """Each host's first master is called master-0: by its name another host's leader would lose its lock."""

    async def main() -> bool:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        lease = await etcd.grant(60)
        lock = MasterLock(master="master-0-5f", url=url, lease=lease.id, network=network)
        await etcd.put(KEY, lock.to_bytes(), lease=lease.id)
        await revoke_lock_of(etcd, KEY, URL)
        return await etcd.get(KEY) is None

    assert run_virtually(main) is goes


@pytest.mark.parametrize("found", [None, b"rubbish"])
def test_no_lock_or_one_that_cannot_be_read_is_left_alone(found: bytes | None) -> None:
    async def main() -> None:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        if found is not None:
            await etcd.put(KEY, found)
        await revoke_lock_of(etcd, KEY, URL)
        kept = await etcd.get(KEY)
        assert (kept.value if kept is not None else None) == found

    run_virtually(main)
