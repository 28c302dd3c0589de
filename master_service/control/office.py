"""What whoever leads a job does beside deciding on tasks: a master in its reign, a masterless job's sweeper in its term."""

from __future__ import annotations

import asyncio

from master_service.control.events import EventRing
from master_service.control.operation_runner import Operating
from master_service.control.pause_runner import Saver
from master_service.control.supervisor import Oversight
from master_service.core.state.metrics import Metrics
from master_service.datasets.manifests import Manifests
from master_service.store.writer import Writer
from shared.etcd import Etcd, Lease
from shared.keys import Keys


class Office:
    """Members, roll-backs and time (`Oversight`), what was asked for (`Operating`), pauses for checkpoints (`Saver`)."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        writer: Writer,
        lease: Lease,
        manifests: Manifests,
        metrics: Metrics,
        events: EventRing,
    ) -> None:
        self.operating = Operating(writer, manifests, events)
        self._oversight = Oversight(etcd, keys, writer, manifests, metrics)
        self._saver = Saver(keys, writer, lease, self._oversight.look_again)

    async def run(self) -> None:
        """Until the writer's reign ends (raises NotLeader in an ExceptionGroup) or cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in (self._oversight, self._saver, self.operating):
                group.create_task(part.run())

    def look_again(self) -> None:
        """The members changed."""
        self._oversight.look_again()
        self._saver.look()
        self.operating.look_again()
