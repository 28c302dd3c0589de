"""The launcher revokes the leases of a dead child, and only those."""

from __future__ import annotations

import random

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme.launch.processes import held_leases
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import MasterLock, PserverMember, TrainerMember

KEYS = Keys("ctr")
FAR = "another machine/4026531840"


def asked(*questions: tuple[str, int]) -> list[list[int]]:
    """The leases found while a pause and an unreadable key lie below the members' prefixes."""

    async def ask() -> list[list[int]]:
        etcd = Etcd(SimulatedEtcd().transport("launcher"))
        for name, pid, network in (
            ("trainer-0-a", 10, own_network()),
            ("trainer-1-b", 11, ""),
            ("far-a", 10, FAR),
        ):
            lease = pid * 10 if network != FAR else 500
            trainer = TrainerMember(
                trainer=name, url="u", incarnation=name, host="h", pid=pid, lease=lease, network=network
            )
            await etcd.put(KEYS.trainer(name), trainer.to_bytes())
        for index, lease, network in ((0, 200, ""), (2, 600, FAR)):
            pserver = PserverMember(
                index=index, url="u", incarnation="p", host="h", pid=20, lease=lease, network=network
            )
            await etcd.put(KEYS.pserver(index), pserver.to_bytes())
        await etcd.put(KEYS.pause, b'{"uuid": "4a5e", "reason": "epoch 2 is done"}')
        await etcd.put(KEYS.trainer("of-another-release"), b'{"name": 1}')
        await etcd.put(KEYS.pserver(1), b"not JSON")
        await etcd.put(KEYS.master_lock, MasterLock(master="master-0-c", url="u", lease=300).to_bytes())
        await etcd.put(KEYS.sweep_lock, MasterLock(master="trainer-1-b", url="u", lease=400).to_bytes())
        held = await held_leases(etcd, KEYS)
        return [held.of(*question) for question in questions]

    rng = random.Random(7)
    return run_virtual(VirtualLoop(rng), ask(), rng)


def test_a_trainer_leases_are_found_while_training_is_paused():
    assert asked(("trainer-0", 10)) == [[100]]


def test_a_sweeper_leaves_its_lock_as_well():
    assert asked(("trainer-1", 11)) == [[110, 400]]


def test_processes_of_another_host_with_the_same_pids_keep_their_leases():
    assert asked(("trainer-0", 10), ("pserver-2", 20)) == [[100], [200]]


def test_a_key_that_nobody_can_read_hides_no_other():
    assert asked(("pserver-0", 20), ("pserver-1", 21), ("master-0", 30)) == [[200], [], [300]]


def test_a_child_that_was_replaced_already_keeps_its_successor_alive():
    assert asked(("trainer-0", 12), ("pserver-0", 22), ("master-1", 30)) == [[], [], []]
