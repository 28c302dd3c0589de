"""Prometheus' metrics of a host agent: what its places do, and how often their processes had to be started again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trireme_shared.protocol.records.cluster import Kind, PoolMember

STATES = ("idle", "running", "task", "ended", "trouble")


class Counted(Protocol):
    """A place."""

    kind: Kind
    deaths: int


class Registration(Protocol):
    @property
    def alive(self) -> bool:
        """Whether etcd has the places now."""
        ...


class HostMetrics:
    """Reads what it tells when somebody asks."""

    def __init__(self) -> None:
        #: What etcd is told of the places.
        self.members: Iterable[PoolMember] = ()
        self.places: Iterable[Counted] = ()
        #: The keys of the places in etcd; None before etcd has had them for the first time.
        self.registration: Registration | None = None

    def missing(self) -> str:
        """Why the agent is not ready; "" if it is."""
        if self.registration is None:
            return "no places registered yet"
        return "" if self.registration.alive else "etcd does not answer: the lease of the places is over"

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "trireme_host_ready", "1 while its places are registered", value=int(not self.missing())
        )
        members = list(self.members)
        kinds = sorted({member.kind for member in members})
        found = Counter((member.kind, state_of(member)) for member in members)
        places = GaugeMetricFamily("trireme_host_places", "places by what they do", labels=("kind", "state"))
        for kind in kinds:
            for state in STATES:
                places.add_metric((kind, state), found[kind, state])
        yield places
        died: Counter[str] = Counter()
        for place in self.places:
            died[place.kind] += place.deaths
        deaths = CounterMetricFamily(
            "trireme_host_deaths", "processes of members that ended before their job", labels=("kind",)
        )
        for kind in kinds:
            deaths.add_metric((kind,), died[kind])
        yield deaths


def state_of(member: PoolMember) -> str:
    """One of STATES."""
    if member.trouble:
        return "trouble"
    if not member.running:
        return "idle"
    if member.ended:
        return "ended"
    return "task" if member.task else "running"
