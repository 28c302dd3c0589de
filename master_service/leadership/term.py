"""One term of one master: the writer, the watch of members and what follows from them, all ending together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from master_service.control.events import EventRing
from master_service.control.office import Office
from master_service.core.decisions.membership import checkpoint_news
from master_service.core.state.changes import Event
from master_service.core.state.job import Job
from master_service.core.state.members import Members
from master_service.core.state.metrics import Metrics
from master_service.datasets.manifests import Manifests
from master_service.leadership.election import Takeover
from master_service.store.members_watch import MembersWatch
from master_service.store.writer import Mandate, Transactor
from shared.etcd import Etcd
from shared.keys import Keys


class Reign:
    """`books` may be read at any time; they change only through `writer`."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        mandate: Mandate,
        start: Takeover,
        events: EventRing,
        manifests: Manifests,
        metrics: Metrics,
    ) -> None:
        self.term = mandate.term
        self.lease = mandate.lease
        self.job: Job = start.job
        self._start, self._events = start, events
        self._watch = MembersWatch(etcd, keys, self._on_members)
        self.writer = Transactor(
            etcd, keys, start.job, mandate, commit_revision=start.commit_revision, on_events=self._on_events
        )
        self.manifests = manifests
        self._office = Office(etcd, keys, self.writer, mandate.lease, manifests, metrics, events)
        self.operating = self._office.operating

    async def run(self) -> None:
        """Until the lock is lost (raises Deposed in an ExceptionGroup) or cancelled."""
        self._on_members(self._watch.start(self._start.found.values()))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writer.run())
            group.create_task(self._watch.run(self._start.revision + 1))
            group.create_task(self._office.run())

    def _on_members(self, members: Members) -> None:
        self._events.add(checkpoint_news(self.job.members, members))
        self.job.members = members
        self._office.look_again()

    def _on_events(self, events: Sequence[Event]) -> None:
        self._events.add(events)
        if events:
            self.operating.look_again()
