"""Many writers of one queue: every trainer of a masterless job decides and writes by itself.

    waiting decisions --taken together on a draft--> one txn --landed--> the draft is the job; answers, events
                                                       |  another writer was first: wait for its commit, decide again
                                                       +- no answer: the watch shows which commit came next
    an error instead of a write: answered only if `tasks/commit` is still where the draft began, else decided again

Each txn compares the mod_revision of `tasks/commit` with the commit that its draft began from, and writes that key. So
commits form one chain, and a decision counts only for the state it was taken on. Decisions of the sweeper also compare the
create_revision of the sweep lock: a trainer that lost the lock cannot write them any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.core.changes import Event
from master_service.core.state.job import Job
from master_service.masterless.view import WatchedJob
from master_service.store.writer import ATTEMPT_S, PAUSE_S, Group, GroupCommit, HeldLock, LockLost
from trireme_shared.platform.etcd import Compare, Etcd, Get, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05

log = telemetry.logger("masterless_writer")


class SharedWriter(GroupCommit):
    """The writer of this process. `losses`: how often another writer was first."""

    def __init__(self, etcd: Etcd, keys: Keys, view: WatchedJob, on_events: Callable[[Sequence[Event]], None]) -> None:
        super().__init__(keys, on_events)
        self.losses = 0
        self._etcd, self._view = etcd, view
        self._lost_in_a_row = 0

    @property
    def job(self) -> Job:
        """Raises NotReady."""
        return self._view.job

    def fence(self, lock: HeldLock | None) -> list[Compare]:
        """What a write depends on."""
        chain = Compare.mod(self._keys.commit, "==", self._view.commit_revision)
        return [chain, lock.compare()] if lock else [chain]

    async def _turn(self) -> None:
        lock = self._waiting[0].lock
        try:
            draft = self._view.hold()
            group = self._decide_waiting(draft)
            done = await (self._commit(draft, group, lock) if group.writes else self._confirm(group))
        except PeerError as error:
            self._refuse(error, lock)
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
        """Errors are answered only if the draft began from the newest commit. False: it did not. Raises PeerError."""
        if all(error is None for _, _, error in group.outcomes):
            return True
        marker = await self._etcd.get(self._keys.commit, timeout_s=ATTEMPT_S)
        at = marker.mod_revision if marker else 0
        if at == self._view.commit_revision:
            return True
        await self._view.reached(at)
        return False

    def _refuse(self, error: PeerError, lock: HeldLock | None) -> None:
        """All that were taken, and all that wait under the same lock, get `error`."""
        while self._waiting and self._waiting[0].lock is lock:
            self._taken.append(self._waiting.popleft())
        for entry in self._taken:
            if not entry.future.done():
                entry.future.set_exception(error)
        self._taken.clear()

    async def _commit(self, draft: Job, group: Group, lock: HeldLock | None) -> bool:
        """Whether it landed; then the draft is the job. False: another writer committed first. Raises LockLost."""
        name, known = ids.new_id("commit").encode(), self._view.commit_revision

        def check() -> None:
            if lock is not None and not lock.lease.alive:
                raise LockLost("the sweeper's lease ran out before a write; another trainer sweeps now")

        async def landed(found: TxnResult) -> int:
            """An earlier attempt had landed if the commit after `known` has its name."""
            marker = found.range(0).first
            at = marker.mod_revision if marker else 0
            if at == known:
                raise LockLost(
                    "the sweep lock is lost, or a checkpoint became the newest meanwhile; the next sweeper decides"
                )
            await self._view.reached(at)
            revision, successor = self._view.successor(known) or (0, b"")
            return revision if successor == name else 0

        writes, reads = [*group.writes, Put(self._keys.commit, name)], [Get(self._keys.commit)]
        write = FencedWrite(self._etcd, [*self.fence(lock), *group.fence], writes, reads, landed, ATTEMPT_S)
        outcome = await write.until_answered(check, PAUSE_S)
        if isinstance(outcome, int):
            self._view.landed(draft, outcome)
            self.commits += 1
            self._lost_in_a_row = 0
            return True
        self.losses += 1
        self._lost_in_a_row += 1
        return False
