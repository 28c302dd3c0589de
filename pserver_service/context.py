"""What checkpoints, recovery and drain of one pserver work with, and how they follow the job's state."""

from __future__ import annotations

from dataclasses import dataclass

from pserver_service.handoff_client import Connect, HttpHandoff
from pserver_service.own_index import OwnIndex
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState
from trireme_shared.serving.pserver import Pserver

LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class PserverContext:
    """`offload` runs what blocks. `connect`: to another parameter server, to hand blocks over."""

    etcd: Etcd
    directory: Directory
    pserver: Pserver
    own_index: OwnIndex
    offload: Offload
    connect: Connect = HttpHandoff

    @property
    def keys(self) -> Keys:
        return self.directory.keys

    @property
    def spec(self) -> JobSpec:
        assert self.directory.spec is not None, "the index is claimed only with the spec known"
        return self.directory.spec


class StateFollower:
    """Answers each state of the job that `is_due`, once."""

    def __init__(self, context: PserverContext) -> None:
        self.context, self._directory = context, context.directory
        self._pserver, self._own_index = context.pserver, context.own_index

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self.answer(state)
            else:
                await self._directory.changed(revision, LOOK_S)

    def is_due(self, state: JobState) -> bool:
        """Whether the state is still to be answered."""
        raise NotImplementedError

    async def answer(self, state: JobState) -> None:
        raise NotImplementedError
