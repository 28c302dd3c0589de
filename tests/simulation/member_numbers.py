"""The simulated launcher follows a resize, as trireme/launch/cluster.py does."""

from __future__ import annotations

from functools import lru_cache

from tests.simulation.cluster import SimulatedCluster
from tests.simulation.nodes import Node
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.assignments import GivenNumbers


class MemberNumbers:
    """`attach` it to a cluster."""

    def __init__(self) -> None:
        self._trainers: int | None = None
        self._launcher: object = None

    def attach(self, cluster: SimulatedCluster) -> None:
        cluster.is_surplus, cluster.every_look = self.is_surplus, self.follow

    def is_surplus(self, cluster: SimulatedCluster, node: Node, code: int) -> bool:
        """Whether a process that has ended is not started again, because the job wants fewer."""
        numbers = wanted(cluster)
        lost = node.kind == "pserver" and code == LEASE_LOST
        return lost and numbers is not None and len(kept(cluster, "pserver")) > numbers[0]

    def follow(self, cluster: SimulatedCluster) -> None:
        """Start and end members, once the numbers in etcd are this launcher's, or follow from them by a
        resize."""
        numbers = wanted(cluster)
        if self._launcher is not cluster.launcher:  # the same command was given again
            self._launcher, self._trainers = cluster.launcher, None
        if numbers is None or cluster.over:
            return
        if self._trainers is None:
            if not _are_own(cluster):
                return
            self._trainers = cluster.spec.trainers
        (pservers, trainers), before = numbers, self._trainers
        self._trainers = trainers
        for kind, count in (("pserver", pservers), ("trainer", trainers if trainers != before else 0)):
            for _ in range(len(kept(cluster, kind)), count):
                name = next(f"{kind}-{n}" for n in range(1000) if f"{kind}-{n}" not in cluster.nodes)
                cluster.start(name, kind)
        if trainers < before:
            for node in kept(cluster, "trainer")[trainers:]:
                node.wanted = False
                node.stopping.set()


def _are_own(cluster: SimulatedCluster) -> bool:
    """A master leads, and the numbers are those of the launcher's command; before, they are an earlier
    command's."""
    spec, given = (cluster.simulated.value(key) for key in (cluster.keys.spec, cluster.keys.given))
    if not spec or not cluster.simulated.value(cluster.keys.master_address):
        return False
    mine = cluster.spec.trainers, cluster.spec.pservers
    found = JobSpec.model_validate_json(spec)
    told = GivenNumbers.model_validate_json(given) if given else None
    return mine == (found.trainers, found.pservers) or (
        told is not None and mine == (told.trainers, told.pservers)
    )


def wanted(cluster: SimulatedCluster) -> tuple[int, int] | None:
    """Parameter servers and trainers that the job wants."""
    desired, spec = (
        cluster.simulated.value(cluster.keys.pservers_desired),
        cluster.simulated.value(cluster.keys.spec),
    )
    return (int(desired), _trainers(spec)) if desired and spec else None


@lru_cache(maxsize=8)
def _trainers(spec: bytes) -> int:
    """Asked for four times a second."""
    return JobSpec.model_validate_json(spec).trainers


def kept(cluster: SimulatedCluster, kind: str) -> list[Node]:
    return [node for node in cluster.nodes.values() if node.kind == kind and node.wanted]
