"""Kills at chosen moments of a resize: whoever is the source, the target, the leader or a trainer just
then."""

from __future__ import annotations

import asyncio

from tests.simulation.cluster import SimulatedCluster
from tests.simulation.nodes import Node
from tests.simulation.operator_requests import may_lose_pserver
from tests.simulation.plans import ResizeKill, Victim
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.assignments import Migration
from trireme_shared.protocol.records.operations import Operation, OperationKind

LOOK_S = 0.002


async def kill_in(cluster: SimulatedCluster, kill: ResizeKill) -> bool:
    """Whether the moment came, and there was a victim."""
    while not cluster.over:
        for operation in resizes(cluster):
            resize = operation.resize
            if resize is not None and resize.phase is kill.phase and resize.groups_moved >= kill.moved:
                await asyncio.sleep(kill.delay_s)
                return await _kill(cluster, kill)
        await asyncio.sleep(LOOK_S)
    return False


async def _kill(cluster: SimulatedCluster, kill: ResizeKill) -> bool:
    node = _victim(cluster, kill.victim)
    spared = kill.victim in (Victim.SOURCE, Victim.TARGET) and not may_lose_pserver(cluster)
    if node is None or cluster.over or spared:
        return False
    cluster.injected += 1
    cluster.say(f"in {kill.phase}: kill the {kill.victim}")
    name, node.wanted = node.process.name, False
    cluster.kill(node)
    cluster.report_dead(node.name)
    await asyncio.sleep(kill.away_s)
    if node.process.name == name and cluster.nodes.get(node.name) is node:
        node.wanted = True
        cluster.start(node.name, node.kind)
    return True


def resizes(cluster: SimulatedCluster) -> list[Operation]:
    """As etcd has them now."""
    names = sorted(cluster.simulated.names(cluster.keys.operations))
    found = [cluster.simulated.value(cluster.keys.operation(name)) for name in names]
    operations = [Operation.model_validate_json(value) for value in found if value is not None]
    return [operation for operation in operations if operation.kind is OperationKind.RESIZE]


def _victim(cluster: SimulatedCluster, victim: Victim) -> Node | None:
    alive = [node for node in cluster.nodes.values() if node.alive]
    match victim:
        case Victim.LEADER:
            return next((node for node in alive if node.kind == "master" and cluster.leads(node)), None)
        case Victim.TRAINER:
            return next((node for node in alive if node.kind == "trainer"), None)
        case Victim.SOURCE | Victim.TARGET:
            pservers = [node for node in alive if node.kind == "pserver" and node.service is not None]
            index = _pserver(cluster, victim)
            return next(
                (node for node in pservers if node.service.index == index), pservers[-1] if pservers else None
            )


def _pserver(cluster: SimulatedCluster, victim: Victim) -> int | None:
    """Of the first group that has not moved; without a migration the last parameter server."""
    migration, slots = (
        cluster.simulated.value(cluster.keys.migration),
        cluster.simulated.value(cluster.keys.slots),
    )
    if migration is None or slots is None:
        return None
    owners = SlotMap.model_validate_json(slots).owners
    groups = Migration.model_validate_json(migration).groups
    group = next((group for group in groups if owners[group.slots[0]] == group.source), groups[-1])
    return group.source if victim is Victim.SOURCE else group.target
