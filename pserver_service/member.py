"""One pserver as a member of its job, HTTP apart: claims an index, holds it, writes checkpoints, follows roll-backs."""

from __future__ import annotations

import asyncio

from pserver_service.checkpoints import Checkpointer
from pserver_service.core.snapshot import Schedule
from pserver_service.disk import Offload
from pserver_service.registration import Registration
from pserver_service.rollback import Rollback
from pserver_service.service import Pserver
from shared.directory import Directory
from shared.etcd import Etcd
from shared.keys import Keys


class Member:
    """Run `directory` beside it. `offload` runs what blocks, one thing at a time."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        directory: Directory,
        pserver: Pserver,
        registration: Registration,
        offload: Offload,
    ) -> None:
        self._directory = directory
        self._pserver = pserver
        self._registration = registration
        self.checkpointer = Checkpointer(etcd, keys, directory, pserver, registration, offload)
        self.rollback = Rollback(etcd, keys, directory, pserver, registration, offload)

    async def run(self, claim_wait_s: float) -> None:
        """Returns when the index is lost. Raises DeadlineExceeded if none is to be had within `claim_wait_s`."""
        self._pserver.index = await self._registration.claim(claim_wait_s)
        assert self._directory.spec is not None
        self._pserver.schedule = Schedule.of(self._directory.spec)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.checkpointer.run()), group.create_task(self.rollback.run())]
            await self._registration.hold()
            for task in tasks:
                task.cancel()
