"""The master's only writer: load -> decide -> compare-and-set, and nobody hears an answer before etcd has it.

    waiting decisions --taken together--> one txn --lands--> answers, events
                                            |  lost the compare: Deposed; drop the books, reload in a new reign
                                            +- outcome unknown: read back; landed, or send the very same txn again

Two compares fence each txn: the lock's create_revision (the term), and `tasks/commit`, which every txn writes: the name of
the txn before is its value. The second makes this master's writes a chain: whatever way they take, each lands right after
the one it was decided upon, so one that was given up for lost and lands late fails, and repeating it after the read-back
cannot apply it twice. That lets a second one fly while the first is under way (`MAX_FLIGHTS`), as soon as it is as large;
answers come in order.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from master_service.core.state.changes import Change, Decision, Event, NextEpoch
from master_service.core.state.job import Job
from master_service.store.schema import operations
from shared.errors import NotLeader, NotReady, PeerError, TriremeError
from shared.etcd import Compare, Delete, Etcd, Get, KeyValue, Lease, Put
from shared.keys import Keys
from shared.runtime import clock, ids, telemetry

MAX_CHANGES = 100
MAX_WAITING = 10_000
ATTEMPT_S = 2.0
PAUSE_S = 0.1
MAX_FLIGHTS = 2

A = TypeVar("A")
log = telemetry.logger("transact")


class Deposed(NotLeader):
    """Another one holds the lock, or the lease ran out: this reign is over."""


@dataclass(frozen=True, slots=True, eq=False)
class Mandate:
    """A lock that is held: what is written on its strength compares its create_revision, the `term`."""

    key: str
    term: int
    lease: Lease

    def compare(self) -> Compare:
        return Compare.create(self.key, "==", self.term)


class Writer(Protocol):
    """Who decides and writes; `books` may be read at any time."""

    @property
    def job(self) -> Job: ...

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        """The decision's answer, once its changes are in etcd. Raises what it raises; PeerError."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    decide: Callable[[Job, float], Decision[Any]]
    future: asyncio.Future[Any]
    mandate: Mandate | None


@dataclass(slots=True)
class Group:
    """Decisions taken together: one transaction."""

    writes: Sequence[Put | Delete] = ()
    events: list[Event] = field(default_factory=list)
    outcomes: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)


class GroupCommit(ABC):
    """What waits is decided together and committed in one transaction. Run `run()` in a TaskGroup."""

    def __init__(self, keys: Keys, on_events: Callable[[Sequence[Event]], None]) -> None:
        self.commits = 0
        self._keys, self._on_events = keys, on_events
        self._waiting: deque[_Waiting] = deque()
        self._taken: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._over: TriremeError | None = None

    async def decide(self, decision: Callable[[Job, float], Decision[A]], mandate: Mandate | None = None) -> A:
        """The decision's answer, once its changes are in etcd; `mandate`: only while that lock is held.

        Raises what the decision raises; NotLeader when the reign ends before (the outcome is then unknown); NotReady
        when too many wait. The decision may be called again after a lost race: it must not have side effects.
        """
        if self._over is not None:
            raise self._over
        if len(self._waiting) >= MAX_WAITING:
            msg = f"{MAX_WAITING} requests wait for etcd already; ask again later"
            raise NotReady(msg)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(decision, future, mandate))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Commit what waits until the reign ends; everybody who waits then hears NotLeader. Raises Deposed."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    self._taken.clear()
                    await self._turn()
        finally:
            self._over = NotLeader("this process decides no more: its reign has ended; ask its successor")
            for entry in (*self._taken, *self._waiting):
                if not entry.future.done():
                    entry.future.set_exception(self._over)
            self._waiting.clear()

    @abstractmethod
    async def _turn(self) -> None:
        """Decide what waits (`_decided_on`), commit it together, answer (`_answer`)."""

    def _decided_on(self, job: Job) -> Group:
        """In place: what waits and fits into one transaction is decided on `books`, and applied to them."""
        now, group, changes = clock.monotonic(), Group(), list[Change]()
        sealed, mandate = False, self._waiting[0].mandate
        while self._waiting and not sealed and self._waiting[0].mandate is mandate:
            entry = self._waiting[0]
            if entry.future.done():  # whoever asked has left
                self._waiting.popleft()
                continue
            decision, error = self._decided(entry, job, now)
            if changes and len(changes) + len(decision.changes) > MAX_CHANGES:
                break
            self._taken.append(self._waiting.popleft())
            group.outcomes.append((entry.future, decision.answer, error))
            changes += decision.changes
            group.events += decision.events
            sealed = NextEpoch in map(type, decision.changes)
            if sealed:  # spelled before the books move on to the next epoch
                group.writes = operations(self._keys, job, changes)
            for change in decision.changes:
                job.apply(change, now)
        if changes and not sealed:
            group.writes = operations(self._keys, job, changes)
        return group

    def _decided(self, entry: _Waiting, job: Job, now: float) -> tuple[Decision[Any], Exception | None]:
        try:
            return entry.decide(job, now), None
        except TriremeError as error:
            return Decision(None), error
        except Exception as error:  # a bug in one decision must not end the reign; the caller hears INTERNAL
            log.exception("decision_failed", job=repr(job))
            return Decision(None), error

    def _answer(self, group: Group) -> None:
        self._on_events(group.events)
        for future, answer, error in group.outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Flight:
    """A group on its way: `name` is what its txn writes to `tasks/commit`, `fence` what it compares."""

    name: bytes
    fence: Sequence[Compare]
    group: Group
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Transactor(GroupCommit):
    """One reign's only writer: its books are the truth. `commit_revision` comes from the takeover (leader.py)."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        job: Job,
        mandate: Mandate,
        *,
        commit_revision: int,
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        super().__init__(keys, on_events)
        self.job = job
        self._etcd, self._mandate, self._commit_revision = etcd, mandate, commit_revision
        self._flights: deque[_Flight] = deque()
        self._last = b""

    def fence(self, after: bytes) -> list[Compare]:
        """What a write of this master depends on; `after`: the name of its write before, if there was one."""
        commit = self._keys.commit
        chain = Compare.value(commit, "==", after) if after else Compare.mod(commit, "==", self._commit_revision)
        return [self._mandate.compare(), chain]

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._sky:
                await super().run()
        finally:
            for flight in self._flights:
                for future, _, _ in flight.group.outcomes:
                    if not future.done() and self._over is not None:
                        future.set_exception(self._over)

    async def _turn(self) -> None:
        if self._flights and not self._is_worth_another():
            self._wake.clear()
            await self._wake.wait()
            return
        group = self._decided_on(self.job)
        self._taken.clear()
        flight = _Flight(ids.new_id("commit").encode(), self.fence(self._last), group)
        if group.writes:
            self._last = flight.name
        before = self._flights[-1] if self._flights else None
        self._flights.append(flight)
        self._sky.create_task(self._fly(flight, before))

    def _is_worth_another(self) -> bool:
        """A transaction has its price whatever it carries: the next waits until it carries as much as the one under way."""
        under_way = len(self._flights[-1].group.outcomes)
        return len(self._flights) < MAX_FLIGHTS and len(self._waiting) >= under_way

    async def _fly(self, flight: _Flight, before: _Flight | None) -> None:
        """Raises Deposed. Without writes there is nothing to send, but what was read must have landed, too."""
        if flight.group.writes:
            await self._commit(flight, before)
            self.commits += 1
        if before is not None:
            await before.landed.wait()
        if not self._mandate.lease.alive:
            raise Deposed("the master's lease ran out before the answer; ask its successor")
        self._flights.popleft()
        flight.landed.set()
        self._wake.set()
        self._answer(flight.group)

    async def _commit(self, flight: _Flight, before: _Flight | None) -> None:
        """Until it has landed, once. Raises Deposed."""
        writes = [*flight.group.writes, Put(self._keys.commit, flight.name)]
        while True:
            if not self._mandate.lease.alive:
                raise Deposed("the master's lease ran out before a write; ask its successor")
            try:
                if (await self._etcd.txn(flight.fence, writes, timeout_s=ATTEMPT_S)).succeeded:
                    return
                reads = [Get(self._mandate.key), Get(self._keys.commit)]
                found = await self._etcd.txn((), reads, timeout_s=ATTEMPT_S)
            except PeerError as error:  # unreachable, or the outcome is unknown: the repeated txn reads back first
                log.warning("commit_unanswered", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if self._has_landed(flight, found.range(1).first):  # the attempt without an answer
                return
            holder = found.range(0).first
            if before is None or holder is None or holder.create_revision != self._mandate.term:
                who = holder.value.decode() if holder else "nobody"
                raise Deposed(f"the master lock of term {self._mandate.term} is lost; {who} holds it now")
            await before.landed.wait()  # this one came first: it was refused for that alone
            before = None

    def _has_landed(self, flight: _Flight, marker: KeyValue | None) -> bool:
        """By what stands in `tasks/commit`: its own name, or one that can only follow it."""
        following = list(self._flights)[self._flights.index(flight) :]
        return marker is not None and any(marker.value == each.name for each in following)
