"""The simulated launcher follows a resize, as trireme/launch/member_numbers.py does."""

from __future__ import annotations

from shared.records import JobSpec
from shared.runtime.service import LEASE_LOST
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.nodes import Node


class MemberNumbers:
    """`attach` it to a cluster."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._launcher: object = None

    def attach(self, cluster: SimulatedCluster) -> None:
        cluster.is_surplus, cluster.every_look = self.is_surplus, self.follow

    def is_surplus(self, cluster: SimulatedCluster, node: Node, code: int) -> bool:
        """Whether a process that has ended is not started again, because the job wants fewer."""
        numbers = wanted(cluster)
        lost = node.kind == "pserver" and code == LEASE_LOST
        return lost and numbers is not None and len(kept(cluster, "pserver")) > numbers[0]

    def follow(self, cluster: SimulatedCluster) -> None:
        """Start and end members, once the numbers in etcd have changed."""
        numbers = wanted(cluster)
        if self._launcher is not cluster.launcher:  # the same command was given again
            self._launcher, self._before = cluster.launcher, None
        if numbers is None or numbers == self._before or cluster.over:
            return
        before, self._before = self._before, numbers
        if before is None:
            return
        pservers, trainers = numbers
        for kind, count in (("pserver", pservers), ("trainer", trainers if trainers != before[1] else 0)):
            for _ in range(len(kept(cluster, kind)), count):
                name = next(f"{kind}-{n}" for n in range(1000) if f"{kind}-{n}" not in cluster.nodes)
                cluster.start(name, kind)
        if trainers < before[1]:
            for node in kept(cluster, "trainer")[trainers:]:
                node.wanted = False
                node.stopping.set()


def wanted(cluster: SimulatedCluster) -> tuple[int, int] | None:
    """Parameter servers and trainers that the job wants."""
    desired, spec = cluster.simulated.value(cluster.keys.pservers_desired), cluster.simulated.value(cluster.keys.spec)
    return (int(desired), JobSpec.model_validate_json(spec).trainers) if desired and spec else None


def kept(cluster: SimulatedCluster, kind: str) -> list[Node]:
    return [node for node in cluster.nodes.values() if node.kind == kind and node.wanted]
