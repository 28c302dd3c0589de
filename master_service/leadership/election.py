"""A process stands for election, and leads under a lease or stands by; its Candidate knows which, and whom to
refuse meanwhile.

A candidate campaigns for the lock under a lease, and works while the lease lives. One that finds the holder's
port closed revokes the holder's lease, so that a restart need not wait for the TTL. At a loopback address
only a candidate of the same network can find that. A master of one job and the leader of a cluster have one
Candidate each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from master_service.control.task_service import Probe
from master_service.store.writer import HeldLock
from trireme_shared.platform.etcd import Etcd, KeyValue, Lease, LeaseLost
from trireme_shared.platform.etcd.fenced import acquire
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.containment import Containment, LongLivedGroup
from trireme_shared.platform.runtime.http import tells
from trireme_shared.protocol.errors import NotLeader, NotReady, PeerError, TriremeError
from trireme_shared.protocol.records import MasterLock

PROBE_EVERY_S = 0.5
PAUSE_S = 0.5
REVOKE_S = 3.0

log = telemetry.logger("election")


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
        """Wait for the lock `key` under `lease`, and hold it. At the end this process leads nothing. `url`,
        `network`: where its REST API is served. Raises LeaseLost."""
        me = MasterLock(master=self.name, url=url, lease=lease.id, network=network)
        try:
            number = await campaign(etcd, key, me, lease, probe, self._note_leader)
            self._leading, self._leader, self.since = True, url, clock.monotonic()
            yield HeldLock(key, number, lease)
        finally:
            self.current, self._leading, self._leader = None, False, ""

    @property
    def term(self) -> T:
        """The term that it leads. Raises NotLeader (also as soon as the lease is over by the local clock),
        NotReady."""
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
        """Whether it leads; False: it stands by for a leader that it knows. Raises NotLeader: it can do
        neither; NotReady."""
        if self._leader and not self._leading:
            return False
        self.term  # noqa: B018  raises
        return True

    def _note_leader(self, holder: MasterLock) -> None:
        self._leader = holder.url


class Leads(Generic[T]):
    """What leads one term after the other, as its candidate says."""

    candidate: Candidate[T]

    @property
    def current_term(self) -> T | None:
        """None on a standby."""
        return self.candidate.current

    @property
    def term(self) -> T:
        """Raises NotLeader, NotReady, as Candidate's."""
        return self.candidate.term

    def check_leading(self) -> None:
        """Raises NotLeader, NotReady."""
        self.term  # noqa: B018  raises

    def check_ready(self) -> bool:
        """Whether it leads; False: it stands by. Raises as Candidate's."""
        return self.candidate.check_ready()


async def stand(
    etcd: Etcd,
    ttl_s: float,
    stopping: asyncio.Event,
    work: Callable[[Lease], Coroutine[None, None, None]],
    on_setback: Callable[[PeerError | LeaseLost], None] = lambda _: None,
) -> None:
    """Run `work` under one lease after the other until `stopping`. Raises errors that the next lease would
    meet again; `on_setback` gets the others."""
    while not stopping.is_set():
        try:
            await run_under_lease(etcd, ttl_s, stopping, work)
        except (PeerError, LeaseLost) as error:
            log.warning("stepped_down", cause=error.message)
            on_setback(error)
            await asyncio.sleep(ids.jitter(PAUSE_S))


async def run_under_lease(
    etcd: Etcd, ttl_s: float, stopping: asyncio.Event, work: Callable[[Lease], Coroutine[None, None, None]]
) -> None:
    """Run `work(lease)` from the grant of a lease until it is lost or `stopping` is set; then the lease is
    revoked at once.

    Raises what `work` raises, out of its exception groups.
    """
    # A task of its own, so that a cancelled caller gets its CancelledError: a TaskGroup whose children fail
    # while it is cancelled raises only their errors.
    term = asyncio.ensure_future(_term(etcd, ttl_s, stopping, work))
    term.add_done_callback(_note_end)
    try:
        await asyncio.wait([term])
    except asyncio.CancelledError:
        term.cancel()
        await asyncio.wait([term])
        raise
    term.result()


def _note_end(term: asyncio.Future[None]) -> None:
    """A caller that is cancelled twice does not read the result: then the error would be reported as never
    retrieved."""
    if not term.cancelled() and (error := term.exception()) is not None:
        log.debug("term_ended", cause=str(error))


async def _term(
    etcd: Etcd, ttl_s: float, stopping: asyncio.Event, work: Callable[[Lease], Coroutine[None, None, None]]
) -> None:
    lease = await etcd.grant(ttl_s)
    try:
        async with LongLivedGroup() as group:
            keeping = Containment().keep(lease.keep_alive, "renewing the lease")
            keeper = group.create_task(keeping)
            ends = [group.create_task(stopping.wait()), group.create_task(lease.lost.wait())]
            working = group.create_task(work(lease))
            await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, keeper, *ends):
                task.cancel()
    except* TriremeError as group_of_errors:
        raise _first(group_of_errors) from group_of_errors
    finally:
        await _revoke(lease)


async def campaign(
    etcd: Etcd, key: str, me: MasterLock, lease: Lease, probe: Probe, on_holder: Callable[[MasterLock], None]
) -> int:
    """Wait for the lock `key`. Answers its create_revision, the term. Raises LeaseLost."""

    seen: list[MasterLock] = []

    async def look_at(kv: KeyValue) -> None:
        holder = read_record(MasterLock, kv.key, kv.value)
        if holder is not None:
            seen[:] = [holder]
            on_holder(holder)

    async def revoke_the_dead() -> None:
        while True:
            for holder in seen:
                if holder.lease and tells(holder.url, holder.network, me.network) and await probe(holder.url):
                    log.info("holder_is_dead", holder=holder.master, url=holder.url)
                    await etcd.revoke(holder.lease)
            await asyncio.sleep(PROBE_EVERY_S)

    async with LongLivedGroup() as group:
        looking = Containment().keep(revoke_the_dead, "looking whether the leader lives")
        probing = group.create_task(looking)
        term = await acquire(etcd, key, me.to_bytes(), lease, on_wait=look_at)
        probing.cancel()
    return term


async def _revoke(lease: Lease) -> None:
    """The next candidate need not wait for the TTL then. Best effort, bounded, also while being cancelled."""

    async def revoke() -> None:
        try:
            async with asyncio.timeout(REVOKE_S):
                await lease.revoke()
        except (TimeoutError, TriremeError) as error:
            log.warning("lease_not_revoked", cause=str(error))

    await asyncio.shield(asyncio.ensure_future(revoke()))


def _first(error: TriremeError | BaseExceptionGroup[TriremeError]) -> TriremeError:
    """The error that caused the others: a caller's error rather than a peer's."""
    if isinstance(error, BaseExceptionGroup):
        return min(map(_first, error.exceptions), key=lambda leaf: leaf.retryable)
    return error
