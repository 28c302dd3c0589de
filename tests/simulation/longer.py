"""A job that gets more epochs: the same command is given again, with another number, when nobody of before lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from master_service.store.start_again import renew
from shared.errors import Conflict, PeerError

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

PAUSE_S = 0.5


async def train_longer(cluster: SimulatedCluster) -> None:
    """If its plan says so: as soon as the lease of the master of before has ended."""
    longer = cluster.spec.model_copy(update={"epochs": cluster.plan.job.epochs})
    if longer == cluster.spec:
        return
    cluster.simulated.renewing = cluster.launcher.name
    while True:
        try:
            await renew(cluster.etcd_of(cluster.launcher.name), cluster.keys, longer, _at_once)
        except (Conflict, PeerError) as error:
            cluster.say(f"not renewed: {error}")
            await asyncio.sleep(PAUSE_S)
        else:
            cluster.spec, cluster.simulated.renewing = longer, ""
            return


async def _at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    await asyncio.sleep(0.002)
    return work(*arguments)
