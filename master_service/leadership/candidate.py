"""A process that leads, takes over, or stands by until it may: what it knows of that, and whom it refuses meanwhile.

A master of one job and the leader of a cluster have one Candidate each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from master_service.control.task_service import Probe
from master_service.leadership.election import campaign
from master_service.store.writer import HeldLock
from trireme_shared.platform.etcd import Etcd, Lease
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import NotLeader, NotReady
from trireme_shared.protocol.records import MasterLock


class Led(Protocol):
    """A term: it ends with its lease."""

    @property
    def lease(self) -> Lease: ...


T = TypeVar("T", bound=Led)


@dataclass(eq=False, slots=True)
class Candidate(Generic[T]):
    #: Name of the process, for people.
    name: str
    #: What a takeover does, for callers that have to ask again.
    taking_over: str
    #: The term that it leads; None before it has taken over, and on a standby.
    current: T | None = field(init=False, default=None)
    #: When it got the lock, in monotonic seconds.
    since: float = field(init=False, default=0.0)
    _leader: str = field(init=False, default="")
    _leading: bool = field(init=False, default=False)

    @asynccontextmanager
    async def elected(
        self, etcd: Etcd, key: str, lease: Lease, probe: Probe, *, url: str, network: str
    ) -> AsyncIterator[HeldLock]:
        """Wait for the lock `key` under `lease`, and hold it. At the end this process leads nothing. `url`, `network`: where its REST API
        is served. Raises LeaseLost."""
        me = MasterLock(master=self.name, url=url, lease=lease.id, network=network)
        try:
            number = await campaign(etcd, key, me, lease, probe, self._note_leader)
            self._leading, self._leader, self.since = True, url, clock.monotonic()
            yield HeldLock(key, number, lease)
        finally:
            self.current, self._leading, self._leader = None, False, ""

    @property
    def term(self) -> T:
        """The term that it leads. Raises NotLeader (also as soon as the lease is over by the local clock), NotReady."""
        if self.current is not None:
            if self.current.lease.alive:
                return self.current
            held_s = round(self.current.lease.held_s, 3)
            raise NotLeader(f"{self.name} lost its lease; ask its successor", retry_after_s=held_s)
        if self._leading:
            raise NotReady(f"{self.name} is {self.taking_over}; ask again")
        if not self._leader:
            raise NotLeader(f"{self.name} stands by; the leader is not known yet", leader="")
        msg = f"{self.name} stands by; the leader is {self._leader}"
        raise NotLeader(msg, leader=self._leader, retry_after_s=0)  # there at once

    def check_ready(self) -> bool:
        """Whether it leads; False: it stands by for a leader that it knows. Raises NotLeader: it can do neither; NotReady."""
        if self._leader and not self._leading:
            return False
        self.term  # noqa: B018  raises
        return True

    def _note_leader(self, holder: MasterLock) -> None:
        self._leader = holder.url
