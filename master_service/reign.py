"""One term of one master: the writer, the watch of members and the sweep, all ending together.

members change -> follow (generation, lanes, phase) -> lost trainers' tasks go back, a roll-back advances (recovery.py)
every sweep    -> tasks over their time -> requeued, discarded, or (lanes) their trainer put out
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.core import books as decisions
from master_service.core.books import Books
from master_service.core.changes import Decision, Event
from master_service.core.members import Members, follow
from master_service.core.metrics import Metrics
from master_service.leader import Takeover
from master_service.manifests import Manifests
from master_service.recovery import Recovery
from master_service.transact import Transactor
from master_service.watching import MembersWatch
from shared import clock, ids, telemetry
from shared.errors import NotLeader, PeerError
from shared.etcd import Etcd, Lease
from shared.keys import Keys

SWEEP_S = 1.0
PAUSE_S = 0.5

log = telemetry.logger("reign")


class Reign:
    """`books` may be read at any time; they change only through `writer`."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        lease: Lease,
        start: Takeover,
        on_events: Callable[[Sequence[Event]], None],
        manifests: Manifests,
        metrics: Metrics,
    ) -> None:
        self.term = start.term
        self.lease = lease
        self.books: Books = start.books
        self._etcd = etcd
        self._start = start
        self._changed = asyncio.Event()
        self._watch = MembersWatch(etcd, keys, self._on_members)
        self.writer = Transactor(
            etcd,
            keys,
            start.books,
            lease,
            term=start.term,
            commit_revision=start.commit_revision,
            on_events=on_events,
        )
        self._recovery = Recovery(etcd, keys, self.writer, manifests, metrics)

    async def run(self) -> None:
        """Until the lock is lost (raises Deposed in an ExceptionGroup) or cancelled."""
        self._on_members(self._watch.start(self._start.found.values()))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writer.run())
            group.create_task(self._watch.run(self._start.revision + 1))
            group.create_task(self._follow_members())
            group.create_task(self._sweep())

    async def put_out(self, trainer: str, reason: str) -> None:
        """End a trainer's membership: its lease is revoked, the watch sees its key vanish."""
        member = self.books.members.trainers.get(trainer)
        if member is None or not member.lease:
            return
        log.warning("trainer_put_out", trainer=trainer, cause=reason)
        await self._etcd.revoke(member.lease)

    def _on_members(self, members: Members) -> None:
        self.books.members = members
        self._changed.set()

    async def _follow_members(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.writer.decide(_follow)
            await self._put_back_lost()
            try:
                if await self._recovery.advance():
                    self._changed.set()
            except NotLeader:
                raise
            except PeerError as error:  # etcd is away; what was read or revoked is done again
                log.warning("recovery_delayed", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()

    async def _put_back_lost(self) -> None:
        while await self.writer.decide(lambda books, _: decisions.put_back_lost(books)):
            pass

    async def _sweep(self) -> None:
        interval = min(SWEEP_S, self.books.spec.task_timeout_floor_s / 4)
        while True:
            await asyncio.sleep(interval)
            late = await self.writer.decide(decisions.expire)
            if not late:
                continue
            self.books.training.grant_again(clock.monotonic())
            for trainer in late:
                await self.put_out(trainer, "its task ran over its time while other lanes wait for it")


def _follow(books: Books, _now: float) -> Decision[None]:
    return follow(books.spec, books.state, books.lanes, books.slots, books.members)
