"""A job that gets more epochs, or the other strategy: the same command is given again, with other settings,
when nobody of before lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from master_service.store.between_runs import renew
from trireme_shared.protocol.errors import Conflict, PeerError
from trireme_shared.protocol.records import JobSpec, Strategy

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

PAUSE_S = 0.5


def give_numbers(cluster: SimulatedCluster, pservers: int, trainers: int) -> None:
    """Of the command that is given again."""
    strategy = Strategy.PARAMETER_SERVER if pservers else Strategy.COLLECTIVE
    cluster.plan = replace(cluster.plan, strategy=strategy)
    given = {"pservers": pservers, "trainers": trainers, "strategy": strategy}
    cluster.spec = cluster.spec.model_copy(update=given)


async def train_longer(cluster: SimulatedCluster) -> None:
    """If its plan says so, or it gets the other strategy: as soon as the lease of the master of before has
    ended."""
    longer = cluster.spec.model_copy(update={"epochs": cluster.plan.job.epochs})
    stored = JobSpec.model_validate_json(cluster.simulated.value(cluster.keys.spec) or longer.to_bytes())
    if (longer.epochs, longer.strategy) == (stored.epochs, stored.strategy):
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
