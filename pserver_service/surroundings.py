"""What the parts of a pserver's life work with."""

from __future__ import annotations

from dataclasses import dataclass

from pserver_service.disk import Offload
from pserver_service.registration import Registration
from pserver_service.service import Pserver
from shared.directory import Directory
from shared.etcd import Etcd
from shared.keys import Keys


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`offload` runs what blocks."""

    etcd: Etcd
    keys: Keys
    directory: Directory
    pserver: Pserver
    registration: Registration
    offload: Offload
