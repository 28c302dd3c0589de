"""The in-process cluster that every suite runs: one simulated etcd, and the product's masters, parameter
servers and trainers.

Services are composed as their `__main__` does it, without HTTP. A suite derives its own cluster: it decides
what replaces storage, network and torch, which services run, and which members are keys in etcd only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from master_service.leadership.master import Master
from pserver_service.context import OwnIndex, PserverContext
from pserver_service.handoff_client import HandoffPort, HttpHandoff
from pserver_service.member import Member
from tests.equipment.etcd.simulated import SimulatedEtcd
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, PserverMember
from trireme_shared.serving.pserver import Pserver


@dataclass(frozen=True)
class PserverProcess:
    """What one process of a parameter server consists of. Run `member`."""

    pserver: Pserver
    directory: Directory
    own_index: OwnIndex
    member: Member


class Cluster:
    """`simulated`: the etcd; `etcd`: the test's client of it. What is made here does not run yet."""

    def __init__(self, spec: JobSpec, simulated: SimulatedEtcd | None = None) -> None:
        self.spec, self.keys = spec, Keys(spec.job)
        self.simulated = simulated or SimulatedEtcd()
        self.etcd = self.etcd_of("test")

    def etcd_of(self, client: str) -> Etcd:
        """A client; its name is what `simulated.cut` and the lost answers refer to."""
        return Etcd(self.simulated.transport(client))

    def connect_pservers(self, member: PserverMember) -> HandoffPort:
        """How one parameter server reaches another."""
        return HttpHandoff(member)

    def master_options(self) -> dict[str, Any]:
        """What masters and dispatchers get in place of their defaults."""
        return {}

    def make_master(self, client: str, name: str, url: str, kind: Callable[..., Any] = Master) -> Any:
        """`kind`: Master, or the Dispatcher of a masterless trainer."""
        return kind(
            self.etcd_of(client), self.keys, name=name, url=url, spec=self.spec, **self.master_options()
        )

    def make_pserver(
        self, pserver: Pserver, url: str, etcd: Etcd, offload: Any, directory: Directory | None = None
    ) -> PserverProcess:
        """`directory`: one that others use too, and somebody else runs."""
        directory = directory or Directory(etcd, self.keys)
        record = PserverMember(index=-1, url=url, incarnation=pserver.incarnation, host="test", pid=1)
        own_index = OwnIndex(etcd, directory, record, fits=pserver.fits)
        member = Member(PserverContext(etcd, directory, pserver, own_index, offload, self.connect_pservers))
        return PserverProcess(pserver, directory, own_index, member)
