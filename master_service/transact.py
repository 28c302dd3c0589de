"""The master's only writer: load -> decide -> compare-and-set, and nobody hears an answer before etcd has it.

    waiting decisions --taken together--> one txn --lands--> answers, events
                                            |  lost the compare: Deposed; drop the books, reload in a new reign
                                            +- outcome unknown: read back; landed, or send the very same txn again

Two compares fence each txn: the lock's create_revision (the term), and the mod_revision of `tasks/commit`, which every
txn writes. The second orders this master's own writes, so a txn that was given up for lost and lands late fails, and
repeating it after the read-back cannot apply it twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from master_service.core.books import Books
from master_service.core.changes import Change, Decision, Event, NextEpoch
from master_service.store import operations
from shared import clock, ids, telemetry
from shared.errors import NotLeader, NotReady, PeerError, TriremeError
from shared.etcd import Compare, Delete, Etcd, Get, Lease, Put
from shared.keys import Keys

MAX_CHANGES = 100
MAX_WAITING = 10_000
ATTEMPT_S = 2.0
PAUSE_S = 0.1

A = TypeVar("A")
log = telemetry.logger("transact")


class Deposed(NotLeader):
    """Another master holds the lock, or the lease ran out: this reign is over."""


@dataclass(slots=True, eq=False)
class _Waiting:
    decide: Callable[[Books, float], Decision[Any]]
    future: asyncio.Future[Any]


class Transactor:
    """One reign's writer. `term` and `commit_revision` come from the takeover (leader.py). Run `run()` in a TaskGroup."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        books: Books,
        lease: Lease,
        *,
        term: int,
        commit_revision: int,
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        self.books = books
        self.term = term
        self.commits = 0
        self._etcd, self._keys, self._lease, self._on_events = etcd, keys, lease, on_events
        self._commit_revision = commit_revision
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._over: TriremeError | None = None

    async def decide(self, decision: Callable[[Books, float], Decision[A]]) -> A:
        """The decision's answer, once its changes are in etcd.

        Raises what the decision raises; NotLeader when the reign ends before (the outcome is then unknown); NotReady
        when too many wait. The decision may be called again after a lost race: it must not have side effects.
        """
        if self._over is not None:
            raise self._over
        if len(self._waiting) >= MAX_WAITING:
            msg = f"{MAX_WAITING} requests wait for etcd already; ask again later"
            raise NotReady(msg)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(decision, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Commit what waits until the reign ends. Raises Deposed; everybody who waits hears NotLeader."""
        taken: list[_Waiting] = []
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    taken.clear()
                    await self._turn(taken)
        finally:
            self._end(taken)

    def fence(self) -> list[Compare]:
        """What every write of this master depends on."""
        return [
            Compare.create(self._keys.master_lock, "==", self.term),
            Compare.mod(self._keys.commit, "==", self._commit_revision),
        ]

    async def _turn(self, taken: list[_Waiting]) -> None:
        """Decide what waits, commit it together, answer."""
        now = clock.monotonic()
        changes: list[Change] = []
        written: list[Put | Delete] = []
        events: list[Event] = []
        outcomes: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        sealed = False
        while self._waiting and not sealed:
            entry = self._waiting[0]
            decision, error = self._decided(entry, now)
            if changes and len(changes) + len(decision.changes) > MAX_CHANGES:
                break
            taken.append(self._waiting.popleft())
            outcomes.append((entry.future, decision.answer, error))
            changes += decision.changes
            events += decision.events
            sealed = any(isinstance(change, NextEpoch) for change in decision.changes)
            if sealed:  # spelled before the books move on to the next epoch
                written = operations(self._keys, self.books, changes)
            for change in decision.changes:
                self.books.apply(change, now)
        if changes:
            await self._commit(written or operations(self._keys, self.books, changes))
        if not self._lease.alive:
            raise Deposed("the master's lease ran out before the answer; ask its successor")
        self._on_events(events)
        for future, answer, error in outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    def _decided(self, entry: _Waiting, now: float) -> tuple[Decision[Any], Exception | None]:
        try:
            return entry.decide(self.books, now), None
        except TriremeError as error:
            return Decision(None), error
        except Exception as error:  # a bug in one decision must not end the reign; the caller hears INTERNAL
            log.exception("decision_failed", books=repr(self.books))
            return Decision(None), error

    async def _commit(self, writes: Sequence[Put | Delete]) -> None:
        """Until it has landed, once. Raises Deposed."""
        name = ids.new_id("commit").encode()
        writes = [*writes, Put(self._keys.commit, name)]
        reads = [Get(self._keys.master_lock), Get(self._keys.commit)]
        while True:
            if not self._lease.alive:
                raise Deposed("the master's lease ran out before a write; ask its successor")
            try:
                result = await self._etcd.txn(self.fence(), writes, reads, timeout_s=ATTEMPT_S)
            except PeerError as error:  # unreachable, or the outcome is unknown: the repeated txn reads back first
                log.warning("commit_unanswered", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if result.succeeded:
                self._commit_revision = result.revision
                break
            marker = result.range(1).first
            if marker is None or marker.value != name:
                holder = result.range(0).first
                who = holder.value.decode() if holder else "nobody"
                raise Deposed(f"the master lock of term {self.term} is lost; {who} holds it now")
            self._commit_revision = marker.mod_revision  # the attempt without an answer had landed
            break
        self.commits += 1

    def _end(self, taken: list[_Waiting]) -> None:
        self._over = NotLeader("this master's reign has ended; ask its successor")
        for entry in (*taken, *self._waiting):
            if not entry.future.done():
                entry.future.set_exception(self._over)
        self._waiting.clear()
