"""What the parts of a pserver's life work with."""

from __future__ import annotations

from dataclasses import dataclass

from pserver_service.checkpoints.writer import Offload
from pserver_service.membership.index import Registration
from pserver_service.pserver import Pserver
from shared.etcd import Etcd
from shared.keys import Keys
from shared.membership.directory import Directory


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`offload` runs what blocks."""

    etcd: Etcd
    keys: Keys
    directory: Directory
    pserver: Pserver
    registration: Registration
    offload: Offload
