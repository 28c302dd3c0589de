"""Moments at which a generation of a collective job ends, each chosen for one safeguard: `play` runs a short
job that has it.

torn    a trainer has a version, two lack it: one of those dies, with blocks that the other may not have got
acked   an owner has data of others, who know that it has, and its version is not whole: it dies
late    a trainer is about to have a version and reads the end of the generation late; only a spare has died
parted  two trainers with lanes do not reach each other for a while as a generation begins; only a spare has
        died
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation import collective
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.collective import CheckedShare, collective_plan
from tests.simulation.compute import Speed
from tests.simulation.nodes import Node
from tests.simulation.plans import Plan
from tests.simulation.run import Outcome, simulate
from trainer_agent.collective.mean_blocks import MeanStore
from trireme_shared.protocol.records import Mode

FIRST = 2  # version from which on something happens
LATE_S = 0.6
PARTED_S = 1.5
MOST_DELAY_S = 0.1  # of a message
ANSWERED_S = MOST_DELAY_S + 0.02
LATE_CHANCE = 0.05
ENOUGH_S = 8.0
"""A job without faults takes half of it; without the safeguard it waits until trainers are evicted because
they do nothing."""

Moment = Callable[[SimulatedCluster, "Once"], None]


class Once:
    """What has happened in a run: at most `most` times, one after the other."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.busy = False

    def kill(self, cluster: SimulatedCluster, node: Node) -> None:
        self.left -= 1
        node.wanted = False
        cluster.kill(node)
        cluster.report_dead(node.name)


def _short(seed: int, *, lanes: int, trainers: int, slowest_s: float) -> Plan:
    drawn = collective_plan(seed)
    job = replace(drawn.job, files=(24, 20), task_records=4, minibatch=2, lanes=lanes, epochs=1)
    conditions = replace(STEADY, low_s=0.005, high_s=MOST_DELAY_S)
    return replace(
        drawn,
        job=job,
        trainers=trainers,
        masters=1,
        speed=Speed(0.01, slowest_s),
        conditions=conditions,
        faults=(),
        slow=1.0,
        stragglers=False,
    )


def _owners(cluster: SimulatedCluster) -> Iterator[tuple[Node, CheckedShare]]:
    for node in cluster.nodes.values():
        share = node.share
        if node.alive and isinstance(share, CheckedShare) and share.store is not None and share.store.own:
            yield node, share


def _torn(cluster: SimulatedCluster, once: Once) -> None:
    has = {node.name: share.store.has for node, share in _owners(cluster) if share.store is not None}
    lacking = [name for name, version in has.items() if version < max(has.values())]
    if max(has.values(), default=0) > FIRST and len(lacking) == 2:
        once.kill(cluster, cluster.nodes[lacking[-1]])


def _acked(cluster: SimulatedCluster, once: Once) -> None:
    for node, share in _owners(cluster):
        store = share.store
        assert store is not None
        if store.has >= FIRST and _has_some(store, store.has):
            once.busy = True
            cluster.launcher.spawn(_kill_when_acknowledged(cluster, node, share, store.has, once))
            return


def _has_some(store: MeanStore, version: int) -> bool:
    """Whether each of its own blocks has data of the step after `version`, of more lanes than one trainer
    has, and lacks some."""
    own = [store.blocks[number] for number in store.own]
    lanes = [sum(last - first for first, last in block.tree.nodes) for block in own]
    return (
        store.has == version
        and all(block.version == version for block in own)
        and min(lanes) > store.lanes // 2
    )


async def _kill_when_acknowledged(
    cluster: SimulatedCluster, node: Node, share: CheckedShare, version: int, once: Once
) -> None:
    await asyncio.sleep(ANSWERED_S)
    if node.alive and node.share is share and share.store is not None and _has_some(share.store, version):
        once.kill(cluster, node)
    once.busy = False


def _late(cluster: SimulatedCluster, once: Once) -> None:
    spares = [
        node for node in cluster.nodes.values() if node.alive and node.share is not None and not _owns(node)
    ]
    for node, share in _owners(cluster):
        store = share.store
        assert store is not None
        whole = store.own_share_has(store.has + 1)
        if spares and not whole and store.has >= FIRST and cluster.rng.random() < LATE_CHANCE:
            once.busy = True
            cluster.launcher.spawn(_cut_for_a_while(cluster, node.process.name, once))
            once.kill(cluster, spares[-1])
            return


async def _cut_for_a_while(cluster: SimulatedCluster, name: str, once: Once) -> None:
    cluster.simulated.cut(name)
    await asyncio.sleep(LATE_S)
    cluster.simulated.mend(name)
    once.busy = False


def _parted(cluster: SimulatedCluster, once: Once) -> None:
    spares = [
        node for node in cluster.nodes.values() if node.alive and node.share is not None and not _owns(node)
    ]
    owners = list(_owners(cluster))
    if (
        spares
        and len(owners) > 2
        and all(share.store.has >= FIRST for _, share in owners if share.store is not None)
    ):
        once.busy = True
        cluster.launcher.spawn(_part_for_a_while(cluster, owners[0][0], owners[1][0], once))
        once.kill(cluster, spares[-1])


async def _part_for_a_while(cluster: SimulatedCluster, one: Node, other: Node, once: Once) -> None:
    cluster.network.cut(one.process, other.process)
    await asyncio.sleep(PARTED_S)
    cluster.network.mend(one.process, other.process)
    once.busy = False


def _owns(node: Node) -> bool:
    return node.share.store is not None and bool(node.share.store.own)


MOMENTS: dict[str, tuple[Moment, int, int, int, float]] = {
    "torn": (_torn, 4, 3, 1, 0.03),
    "acked": (_acked, 4, 3, 1, 0.1),
    "late": (_late, 2, 5, 3, 0.03),
    "parted": (_parted, 4, 5, 1, 0.03),
}
"""By name: what happens, lanes, trainers, how often, and for how long a trainer computes at most, in
seconds."""


def play(name: str, seed: int) -> Outcome:
    """`violations` says also if the job takes longer than ENOUGH_S."""
    moment, lanes, trainers, most, slowest_s = MOMENTS[name]
    once, check = Once(most), collective.check_complete
    look = SimulatedCluster.check_versions

    def act(cluster: SimulatedCluster) -> None:
        if once.left and not once.busy and not cluster.over:
            moment(cluster, once)

    def completed(cluster: SimulatedCluster, share: CheckedShare) -> None:
        check(cluster, share)
        act(cluster)

    def looked(cluster: SimulatedCluster) -> None:
        look(cluster)
        act(cluster)

    plan = _short(seed, lanes=lanes, trainers=trainers, slowest_s=slowest_s)
    with (
        replaced(collective, "check_complete", completed),
        replaced(SimulatedCluster, "check_versions", looked),
        replaced(Plan, "bound_s", property(lambda _: 40.0)),
    ):
        outcome = simulate(seed, Mode.SYNC, plan=plan)
    if outcome.seconds > ENOUGH_S:
        outcome.violations.append(f"the job took {outcome.seconds:.1f} s")
    if once.left == most:
        outcome.violations.append("nothing has happened")
    return outcome
