"""A suspected member's registration ends when its lease's time is over, not when etcd comes by; nobody that
renews its lease is touched."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from master_service.control.evictions import Evictions, LeaseEnd
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, running, spec_of
from trireme_shared.platform.etcd import Lease
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import TrainerMember

TTL_S = 2.0
NEW_S = 0.05
TOLD_S = 0.6  # after the freeze
LATE_S = 0.15  # at most, after the lease's end
FREEZES = 10


async def added(cluster: MasterCluster, name: str) -> tuple[Lease, asyncio.Task[None]]:
    lease = await cluster.etcd.grant(TTL_S)
    member = TrainerMember(
        trainer=name, url=f"http://{name}", incarnation=name, host="h", pid=1, lease=lease.id
    )
    await cluster.etcd.put(KEYS.trainer(name), member.to_bytes(), lease.id)
    return lease, asyncio.ensure_future(lease.keep_alive())


async def frozen_s(cluster: MasterCluster, master: Master, name: str) -> float:
    """From the last renewal of a trainer that freezes at once after it until it is no member."""
    lease, renewing = await added(cluster, name)
    await until(lambda: name in master.job.members.trainers, f"{name} to be there")
    await asyncio.sleep(1.0)
    await until(lambda: lease.unrenewed_s < NEW_S, "a renewal")
    renewing.cancel()
    renewed = clock.monotonic() - lease.unrenewed_s
    await asyncio.sleep(TOLD_S)
    assert not await master.report_suspect(name)
    await until(lambda: name not in master.job.members.trainers, f"{name} to be gone")
    return clock.monotonic() - renewed


async def longest_s() -> float:
    cluster = MasterCluster(spec_of(lease_ttl_s=TTL_S))
    async with running(cluster, "t1") as master:
        return max([await frozen_s(cluster, master, f"f{number}") for number in range(FREEZES)])


def test_a_frozen_member_is_none_once_its_lease_is_over() -> None:
    async def main() -> None:
        assert await longest_s() < TTL_S + LATE_S

    run_virtually(main)


def test_without_a_look_at_its_lease_etcd_ends_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation."""
    monkeypatch.setattr(Evictions, "suspect", lambda *_: None)

    async def main() -> None:
        assert await longest_s() > TTL_S + LATE_S

    run_virtually(main)


def test_a_suspected_member_that_renews_its_lease_stays() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(lease_ttl_s=TTL_S))
        async with running(cluster, "t1") as master:
            lease, renewing = await added(cluster, "slow")
            await until(lambda: "slow" in master.job.members.trainers, "it to be there")
            for _ in range(100):
                assert not await master.report_suspect("slow")
                await asyncio.sleep(0.23)
            assert lease.alive
            assert "slow" in master.job.members.trainers
            renewing.cancel()

    run_virtually(main)


@pytest.mark.parametrize("ttl_s", [2, 3, 5])
def test_no_lease_that_may_be_renewed_is_called_over(ttl_s: int) -> None:
    """Renewals, questions and their answers at random times; now and then who asks is held up for longer than
    the lease lives."""
    chance, called = random.Random(ttl_s), 0
    for _ in range(2_000):
        lease, now = LeaseEnd(ttl_s), 0.0
        renewals = sorted(chance.uniform(0, 4) for _ in range(chance.choice([0, 1, 2, 8])))
        ends = float(ttl_s)
        while now < 12 and not lease.renewed and not lease.over:
            asked = now
            read = asked + chance.expovariate(200)
            answered = read + chance.expovariate(200)
            for renewal in [each for each in renewals if each <= read]:
                renewals.remove(renewal)
                ends = renewal + ttl_s if renewal < ends else ends
            if read >= ends + 0.5:
                break
            left_s = math.trunc(ends - read)
            lease.take(asked, answered, left_s)
            assert not lease.over or read >= ends
            called += lease.over
            now = answered + (
                chance.uniform(0, 2 * ttl_s) if chance.random() < 0.05 else max(0.05, left_s - 1)
            )
    assert called > 100


def test_a_question_that_comes_late_begins_anew() -> None:
    """A lease of 2 s, asked for at 0 and again at 2.05 s: renewed at 0.3 s it has 0.25 s left."""
    lease = LeaseEnd(2)
    lease.take(0.0, 0.0, 1)
    lease.take(2.05, 2.05, 0)
    assert not lease.over
    lease.take(2.2, 2.2, 0)
    assert not lease.over
