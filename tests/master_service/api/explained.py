"""What `GET /v1/job/explanation` tells of a job in the in-process cluster, and failures that trainers
report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import client_of
from tests.master_service.cluster import KEYS, MasterCluster, Storage, leading, running, spec_of
from trireme_shared.protocol.records import (
    MetricBatch,
    PserverMember,
    TrainerMember,
    UserFailure,
)
from trireme_shared.protocol.records.tasks import StepMetrics

Explanation = dict[str, Any]
LONG_S = 10.0  # without progress, but shorter than the time limit of a task


async def explained(master: Master) -> Explanation:
    async with client_of(master) as client:
        response = await client.get("/v1/job/explanation")
        assert response.status_code == 200, response.text
        told: Explanation = response.json()
        assert told["job"] == "j"
        for cause in (told, *told["also"]):
            assert cause["summary"].endswith((".", "!")) or ":" in cause["summary"], cause
            assert cause["hints"], cause
        return told


def codes(told: Explanation) -> list[str]:
    return [told["code"], *(cause["code"] for cause in told["also"])]


def also(told: Explanation, code: str) -> Explanation:
    return next(cause for cause in told["also"] if cause["code"] == code)


def text(cause: Explanation) -> str:
    return " ".join([cause["summary"], *cause["details"]])


async def keep_leases(cluster: MasterCluster) -> list[asyncio.Task[None]]:
    """Members get leases of the job's time to live, which are renewed until the tasks are cancelled (pservers
    first)."""
    renewing = []
    for name in cluster.leases:
        kind, key = (
            (PserverMember, KEYS.pserver(int(name[8:])))
            if "-" in name
            else (TrainerMember, KEYS.trainer(name))
        )
        found = await cluster.etcd.get(key)
        assert found is not None
        lease = await cluster.etcd.grant(cluster.spec.lease_ttl_s)
        member = kind.model_validate_json(found.value).model_copy(update={"lease": lease.id})
        await cluster.etcd.put(key, member.to_bytes(), lease.id)
        cluster.leases[name] = lease.id
        renewing.append(asyncio.ensure_future(lease.keep_alive()))
    return renewing


def in_job(
    script: Callable[[MasterCluster, Master], Awaitable[None]],
    *trainers: str,
    storage: Storage | None = None,
    **spec: Any,
) -> None:
    """`script` with a job that runs, whose members renew their leases."""

    async def main() -> None:
        cluster = MasterCluster(spec_of(**spec), storage)
        async with running(cluster, *(trainers or ("t1",))) as master:
            renewing = await keep_leases(cluster)
            cluster.renewing = renewing
            await asyncio.sleep(0.1)
            await script(cluster, master)
            for each in renewing:
                each.cancel()
            await asyncio.wait(renewing)

    run_virtually(main)


def waiting(script: Callable[[MasterCluster, Master], Awaitable[None]], **spec: Any) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(**spec))
        async with leading(cluster.master()) as master:
            await script(cluster, master)

    run_virtually(main)


def failure(error_type: str, message: str = "shape [3] is not [4]", trainer: str = "t2") -> UserFailure:
    return UserFailure(error_type=error_type, message=message, trainer=trainer)


async def progressed(master: Master, steps: int = 3) -> None:
    """t1 reports a step a second."""
    first = master.metrics.step or 0
    for number in range(first, first + steps):
        shares = (StepMetrics(step=number, epoch=0, records=8, loss_sum=1.0),)
        await master.report_metrics(MetricBatch(trainer="t1", steps=shares))
        await asyncio.sleep(1)
