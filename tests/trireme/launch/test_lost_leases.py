"""The launcher ends a child whose lease is gone, a trainer that works late; never because etcd itself is
silent."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual
from trireme.launch.leases import WORKING_GRACE_S, LostLease, LostLeases
from trireme.launch.processes import HeldLeases
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.life_sign import ProcessorUse
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import MasterLock, PserverMember, TrainerMember

KEYS = Keys("ctr")
SPINNING, WAITING = "while True: pass", "import time; time.sleep(600)"
TTL_S = 5.0
PSERVER = PserverMember(index=0, url="u", incarnation="p", host="h", pid=20, lease=1)


def watched(script, use_of=lambda pid: None) -> list[tuple[str, float]]:
    """What was ended while `script(etcd, server)` ran, with the seconds since the last renewal. Children: one
    of each kind."""
    return [(name, round(lost.silent_s)) for name, lost in ended_in(script, use_of)]


def ended_in(script, use_of) -> list[tuple[str, LostLease]]:
    """`use_of`: pid -> processor time."""

    async def main() -> list[tuple[str, LostLease]]:
        server = SimulatedEtcd()
        etcd, own = Etcd(server.transport("member")), Etcd(server.transport("launcher"))
        lost, ended = LostLeases(TTL_S, use_of), []
        alive = {"trainer-0": 10, "pserver-0": 20, "pserver-1": 21, "master-0": 30, "master-1": 31}

        def end(name: str) -> None:
            ended.append((name, lost.ended(alive.pop(name))))

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


def working(share: float, *, stopped: bool = False):
    """Every process takes so much of a processor."""
    return lambda _: ProcessorUse(share * clock.monotonic(), stopped)


async def all_lose_their_leases(etcd: Etcd, _) -> None:
    await register(etcd)
    await etcd.delete(KEYS.prefix, prefix=True)
    await asyncio.sleep(2 * WORKING_GRACE_S)


def test_a_trainer_that_works_is_ended_late_and_members_that_the_job_waits_for_are_not():
    ended = dict(ended_in(all_lose_their_leases, working(0.1)))
    assert {name: lost.silent_s // 10 * 10 for name, lost in ended.items()} == {
        "pserver-0": 10,
        "master-0": 10,
        "trainer-0": TTL_S // 10 * 10 + WORKING_GRACE_S,
    }
    assert {str(lost).partition(" for ")[0] for lost in ended.values()} == {"working without a lease"}


def test_who_was_stopped_by_a_signal_is_told_from_who_is_cut_off():
    """What a stopped process had begun is not to blame for its end."""
    for stopped in (True, False):
        ended = ended_in(all_lose_their_leases, working(0.01, stopped=stopped))
        assert ended
        assert {lost.stopped for _, lost in ended} == {stopped}


@pytest.mark.parametrize("use_of", [working(0.01), working(1.0, stopped=True), lambda _: None])
def test_one_that_only_asks_etcd_is_stopped_or_of_which_nothing_is_known_is_ended_soon(use_of):
    ended = dict(ended_in(all_lose_their_leases, use_of))
    assert ended.keys() == {"trainer-0", "pserver-0", "master-0"}
    assert all(2 * TTL_S < lost.silent_s < 2 * TTL_S + 3 for lost in ended.values()), ended
    assert {str(lost).partition(" for ")[0] for lost in ended.values()} == {"frozen or cut off"}


def test_a_trainer_that_stops_working_has_the_short_grace_from_then_on():
    worked_s = 20.0
    ended = ended_in(
        all_lose_their_leases, lambda _: ProcessorUse(min(clock.monotonic(), worked_s), stopped=False)
    )
    ((_, lost),) = [each for each in ended if each[0] == "trainer-0"]
    assert worked_s + TTL_S < lost.silent_s < worked_s + 2 * TTL_S + 3
    assert str(lost).startswith("frozen or cut off for ")


def test_a_trainer_that_works_and_registers_again_within_its_grace_is_left_alone():
    trainer = TrainerMember(trainer="trainer-0-a", url="u", incarnation="a", host="h", pid=10, lease=2)

    async def script(etcd, _):
        await register(etcd)
        for _ in range(2):
            await etcd.delete(KEYS.trainer("trainer-0-a"))
            await asyncio.sleep(WORKING_GRACE_S - 2)
            await etcd.put(KEYS.trainer("trainer-0-a"), trainer.to_bytes())
            await asyncio.sleep(2)

    assert ended_in(script, working(1.0)) == []


@contextmanager
def running(code: str) -> Iterator[int]:
    """The pid; nothing is left of it afterwards."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_of_trainers_without_leases_those_that_are_stopped_and_idle_are_overdue_and_one_that_spins_is_not():
    with ExitStack() as stack:
        codes = {"trainer-0": SPINNING, "trainer-1": SPINNING, "trainer-2": WAITING}
        alive = {name: stack.enter_context(running(code)) for name, code in codes.items()}
        lost, overdue = LostLeases(lease_ttl_s=5.0), set()
        lost.grace_s = 1.0
        members = [
            TrainerMember(trainer=n, url="", incarnation="", host="h", pid=p, lease=1)
            for n, p in alive.items()
        ]
        lost.observe(HeldLeases(tuple(members), (), None, None), alive, 0.0)
        os.kill(alive["trainer-1"], signal.SIGSTOP)
        began = before = time.monotonic()
        while time.monotonic() < began + 3.0:
            time.sleep(0.3)
            now = time.monotonic()
            overdue |= set(lost.observe(HeldLeases((), (), None, None), alive, now - before))
            before = now
        assert overdue == {"trainer-1", "trainer-2"}
        told = [str(lost.ended(pid)).rpartition(" for ")[0] for pid in alive.values()]
        assert told == ["working without a lease", "frozen or cut off", "frozen or cut off"]
