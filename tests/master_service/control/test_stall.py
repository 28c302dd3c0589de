"""For whom a job waits that makes no progress, as `GET /v1/job` tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from master_service.control.observation import STALL_S
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import client_of
from tests.master_service.cluster import KEYS, MasterCluster, running, spec_of
from trireme_shared.platform.etcd import Lease
from trireme_shared.protocol.records import MetricBatch, PserverMember
from trireme_shared.protocol.records.tasks import StepMetrics

TTL_S = 5.0
Script = Callable[[MasterCluster, Master, "asyncio.Task[None]"], Awaitable[None]]


async def report(master: Master, step: int, seconds: float) -> None:
    """Trainer t1 reports a step a second."""
    for number in range(step, step + int(seconds)):
        steps = (StepMetrics(step=number, epoch=0, records=8, loss_sum=1.0),)
        await master.report_metrics(MetricBatch(trainer="t1", steps=steps))
        await asyncio.sleep(1)


async def renewing_pserver(cluster: MasterCluster) -> asyncio.Task[None]:
    """pserver-0 gets a lease of TTL_S, which lives until the task is cancelled."""
    lease: Lease = await cluster.etcd.grant(TTL_S)
    found = await cluster.etcd.get(KEYS.pserver(0))
    assert found is not None
    member = PserverMember.model_validate_json(found.value).model_copy(update={"lease": lease.id})
    await cluster.etcd.put(KEYS.pserver(0), member.to_bytes(), lease.id)
    return asyncio.ensure_future(lease.keep_alive())


def polled(script: Script) -> list[tuple[float, dict[str, Any]]]:
    """What `GET /v1/job` answered twice a second while `script` ran, with the seconds since its begin."""

    async def main() -> list[tuple[float, dict[str, Any]]]:
        cluster, answers = MasterCluster(spec_of(lease_ttl_s=TTL_S, mode="sync")), []
        async with running(cluster, "t1") as master, client_of(master) as client:
            renewing = await renewing_pserver(cluster)
            began = asyncio.get_running_loop().time()

            async def poll() -> None:
                while True:
                    job = (await client.get("/v1/job")).json()
                    answers.append((asyncio.get_running_loop().time() - began, job))
                    await asyncio.sleep(0.5)

            polling = asyncio.ensure_future(poll())
            await script(cluster, master, renewing)
            polling.cancel()
            renewing.cancel()
            await asyncio.wait([polling, renewing])
        return answers

    return run_virtually(main)


def test_a_silent_pserver_is_named_with_the_seconds_and_there_is_no_eta() -> None:
    async def script(_: MasterCluster, master: Master, renewing: asyncio.Task[None]) -> None:
        await report(master, 0, 10)
        renewing.cancel()
        await asyncio.sleep(15)

    answers = polled(script)
    assert {job["stalled"] for at, job in answers if at < 9 + STALL_S} == {""}
    assert any(job["progress"]["eta_s"] for at, job in answers if 5 < at < 10)
    stalled = [(at, job) for at, job in answers if job["stalled"]]
    assert stalled[-1][1]["stalled"].startswith("waiting for pserver-0, silent for 1")
    assert stalled[0][0] < 10 + 2 * STALL_S
    assert [at for at, _ in stalled] == [at for at, _ in answers if at >= stalled[0][0]], "from then on"
    assert {(job["progress"]["eta_s"], job["progress"]["records_per_s"]) for _, job in stalled} == {
        (None, None)
    }


def test_a_long_step_is_no_stall() -> None:
    async def script(_: MasterCluster, master: Master, __: asyncio.Task[None]) -> None:
        await report(master, 0, 5)
        await asyncio.sleep(60)

    assert {job["stalled"] for _, job in polled(script)} == {""}


def test_a_stall_ends_with_the_next_step() -> None:
    async def script(cluster: MasterCluster, master: Master, renewing: asyncio.Task[None]) -> None:
        await report(master, 0, 5)
        renewing.cancel()
        await asyncio.sleep(3)
        again = await renewing_pserver(cluster)
        await report(master, 5, 3)
        again.cancel()

    answers = polled(script)
    assert any(job["stalled"] for _, job in answers)
    assert answers[-1][1]["stalled"] == ""
