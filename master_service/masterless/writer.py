"""Many writers of one queue: every trainer of a masterless job decides and writes by itself.

    waiting decisions --taken together on a draft--> one txn --lands--> the draft is the books; answers, events
                                                       |  somebody else committed first: hear it, decide again
                                                       +- no answer: the watch tells who committed next
    refused without a write: only once `tasks/commit` is seen to be where the draft began, else decided again

Each txn compares the mod_revision of `tasks/commit` with the commit that its draft began from, and writes it: commits form
one chain, and a decision counts only on the books it was taken on. What the holder of the sweep lock decides as such
compares that lock's create_revision as well, so one that was deposed writes nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.core.state.changes import Decision, Event
from master_service.core.state.job import Job
from master_service.masterless.view import SharedBooks
from master_service.store.writer import (
    ATTEMPT_S,
    PAUSE_S,
    A,
    Deposed,
    Group,
    GroupCommit,
    Mandate,
)
from shared.errors import PeerError
from shared.etcd import Compare, Delete, Etcd, Get, Put
from shared.keys import Keys
from shared.runtime import ids, telemetry

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05

log = telemetry.logger("shared_transact")


class SharedTransactor(GroupCommit):
    """This process's writer. `losses`: how often somebody else was first."""

    def __init__(self, etcd: Etcd, keys: Keys, view: SharedBooks, on_events: Callable[[Sequence[Event]], None]) -> None:
        super().__init__(keys, on_events)
        self.losses = 0
        self._etcd, self._view = etcd, view
        self._lost_in_a_row = 0

    @property
    def job(self) -> Job:
        """Raises NotReady."""
        return self._view.job

    def fence(self, mandate: Mandate | None) -> list[Compare]:
        """What a write depends on."""
        chain = Compare.mod(self._keys.commit, "==", self._view.commit_revision)
        return [chain, mandate.compare()] if mandate else [chain]

    async def _turn(self) -> None:
        mandate = self._waiting[0].mandate
        try:
            draft = self._view.hold()
            group = self._decided_on(draft)
            done = await (self._commit(draft, group.writes, mandate) if group.writes else self._confirm(group))
        except PeerError as error:
            self._refuse(error, mandate)
            return
        finally:
            self._view.release()
        if done:
            self._answer(group)
            return
        self._waiting.extendleft(reversed(self._taken))
        self._taken.clear()
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._lost_in_a_row)
        await asyncio.sleep(ids.jitter(pause_s))

    async def _confirm(self, group: Group) -> bool:
        """A refusal counts only on books that lack no write of the others. False: they did. Raises PeerError."""
        if all(error is None for _, _, error in group.outcomes):
            return True
        marker = await self._etcd.get(self._keys.commit, timeout_s=ATTEMPT_S)
        at = marker.mod_revision if marker else 0
        if at == self._view.commit_revision:
            return True
        await self._view.heard(at)
        return False

    def _refuse(self, error: PeerError, mandate: Mandate | None) -> None:
        """Those of the mandate, or all if the books are not open."""
        while self._waiting and self._waiting[0].mandate is mandate:
            self._taken.append(self._waiting.popleft())
        for entry in self._taken:
            if not entry.future.done():
                entry.future.set_exception(error)
        self._taken.clear()

    async def _commit(self, draft: Job, writes: Sequence[Put | Delete], mandate: Mandate | None) -> bool:
        """Whether it has landed, once; the draft is the books then. False: somebody else was first. Raises Deposed."""
        name, known, fence = ids.new_id("commit").encode(), self._view.commit_revision, self.fence(mandate)
        writes = [*writes, Put(self._keys.commit, name)]
        while True:
            if mandate is not None and not mandate.lease.alive:
                raise Deposed("the sweeper's lease ran out before a write; another trainer sweeps now")
            try:
                result = await self._etcd.txn(fence, writes, [Get(self._keys.commit)], timeout_s=ATTEMPT_S)
            except PeerError as error:  # unreachable, or the outcome is unknown: sent again, it lands once at most
                log.warning("commit_unanswered", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if result.succeeded:
                return self._landed(draft, result.revision)
            marker = result.range(0).first
            at = marker.mod_revision if marker else 0
            if at == known:
                raise Deposed("the sweep lock is lost; another trainer sweeps now")
            await self._view.heard(at)
            if (successor := self._view.successor(known)) is not None and successor[1] == name:
                return self._landed(draft, successor[0])  # the attempt without an answer had landed
            self.losses += 1
            self._lost_in_a_row += 1
            return False

    def _landed(self, draft: Job, revision: int) -> bool:
        self._view.landed(draft, revision)
        self.commits += 1
        self._lost_in_a_row = 0
        return True


class Mandated:
    """The writer as the holder of a lock: a master_service.store.writer.Writer."""

    def __init__(self, writer: SharedTransactor, mandate: Mandate) -> None:
        self._writer, self._mandate = writer, mandate

    @property
    def job(self) -> Job:
        return self._writer.job

    async def decide(self, decision: Callable[[Job, float], Decision[A]]) -> A:
        return await self._writer.decide(decision, self._mandate)
