"""What checkpoints, recovery and drain of one pserver work with."""

from __future__ import annotations

from dataclasses import dataclass

from pserver_service.membership.index import OwnIndex
from pserver_service.pserver import Pserver
from shared.checkpoints.background import Offload
from shared.etcd import Etcd
from shared.keys import Keys
from shared.membership.directory import Directory


@dataclass(frozen=True, slots=True)
class PserverContext:
    """`offload` runs what blocks."""

    etcd: Etcd
    directory: Directory
    pserver: Pserver
    own_index: OwnIndex
    offload: Offload

    @property
    def keys(self) -> Keys:
        return self.directory.keys
