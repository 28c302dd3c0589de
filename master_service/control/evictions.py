"""The leader ends a member's registration: only while it holds its lock, and only the very registration that
it means.

lock held, key under that lease --one transaction--> key deleted
   |           |                     --> lease revoked, with whatever else it holds
   |           `-- key under another lease: it belongs to a newer registration, nothing is done
   `-- lock lost: LockLost

A frozen member answers nothing, and its lease tells when it is over: etcd ends it up to 0.5 s later. The
leases of members that others suspect are looked at (`LeaseEnd`), and ended when their time is over.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

from master_service.store.writer import ATTEMPT_S, PAUSE_S, HeldLock, LockLost
from trireme_shared.platform.etcd import Compare, Delete, Etcd, Get, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import PserverMember, TrainerMember

LIMIT_S = 10.0
WATCHED = 16  # leases that are looked at at once; etcd ends the others
LOOK_S = 0.05
ANSWER_S = 1.0
LATE_S = 0.5  # etcd ends leases at most so late

log = telemetry.logger("evictions")


class Evictions:
    """`lock` None: of a trainer of a masterless job that does not sweep; it ends only members that it knows
    to be dead. `ended`: names of members whose registration was ended."""

    def __init__(self, etcd: Etcd, keys: Keys, lock: HeldLock | None) -> None:
        self._etcd, self._keys, self._lock = etcd, keys, lock
        self.ended: set[str] = set()
        self._watched: set[int] = set()
        # of those watched
        self._suspects: asyncio.Queue[tuple[TrainerMember | PserverMember, float]] = asyncio.Queue()

    async def run(self) -> None:
        """Look at the leases of suspects. Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._end_overdue(*await self._suspects.get()))

    def suspect(self, member: TrainerMember | PserverMember, ttl_s: float) -> None:
        """Somebody waits for that member: `run` ends its lease as soon as that is over, unless it is
        renewed."""
        if member.lease and member.lease not in self._watched and len(self._watched) < WATCHED:
            self._watched.add(member.lease)
            self._suspects.put_nowait((member, ttl_s))

    async def _end_overdue(self, member: TrainerMember | PserverMember, ttl_s: float) -> None:
        name, lease, deadline = self._place(member)[0], LeaseEnd(ttl_s), clock.monotonic() + ttl_s + LATE_S
        try:
            while clock.monotonic() < deadline:
                asked = clock.monotonic()
                left_s = await self._etcd.time_to_live(member.lease, timeout_s=ANSWER_S)
                lease.take(asked, clock.monotonic(), left_s)
                if left_s < 0 or lease.renewed:
                    return
                if lease.over:  # without a fence: etcd is about to do the same
                    log.warning("lease_is_over", suspect=name, ttl_s=ttl_s)
                    await self._etcd.revoke(member.lease, timeout_s=ANSWER_S)
                    return
                await asyncio.sleep(max(LOOK_S, left_s - 1))
        except TriremeError as error:  # etcd ends it
            log.info("lease_not_watched", suspect=name, cause=error.message)
        finally:
            self._watched.discard(member.lease)

    async def end(self, member: TrainerMember | PserverMember, cause: str) -> bool:
        """Whether that registration is over now. Raises LockLost; DeadlineExceeded if etcd does not
        answer."""
        if not member.lease:
            return False
        name, key = self._place(member)
        fence = [Compare.lease(key, "==", member.lease)]
        reads = [Get(key)]
        if self._lock is not None:
            fence.append(self._lock.compare())
            reads.append(Get(self._lock.key))
        landed = partial(self._landed, self._lock)
        write = FencedWrite(self._etcd, fence, [Delete(key)], reads, landed, ATTEMPT_S)
        check = partial(self._check, name, clock.monotonic() + LIMIT_S)
        if not isinstance(await write.until_answered(check, PAUSE_S), int):
            return False
        self.ended.add(name)
        log.warning("member_evicted", evicted=name, cause=cause)
        try:
            await self._etcd.revoke(member.lease)
        except PeerError as error:
            log.warning("lease_not_revoked", evicted=name, cause=error.message)
        return True

    def _place(self, member: TrainerMember | PserverMember) -> tuple[str, str]:
        if isinstance(member, TrainerMember):
            return member.trainer, self._keys.trainer(member.trainer)
        return f"pserver-{member.index}", self._keys.pserver(member.index)

    def _check(self, name: str, deadline: float) -> None:
        if self._lock is not None and not self._lock.lease.alive:
            raise LockLost(
                "the leader's lease ran out before it could end a member's registration; ask its successor"
            )
        if clock.monotonic() > deadline:
            raise DeadlineExceeded(f"etcd did not answer within {LIMIT_S:g} s whether {name} is evicted")

    async def _landed(self, lock: HeldLock | None, found: TxnResult) -> int:
        """A key that is gone was deleted by an earlier attempt, or by its owner. Raises LockLost."""
        if lock is not None:
            holder = found.range(1).first
            if holder is None or holder.create_revision != lock.term:
                who = holder.value.decode() if holder else "nobody"
                raise LockLost(f"{lock.key} of term {lock.term} is lost; {who} holds it now")
        return found.revision if found.range(0).first is None else 0


class LeaseEnd:
    """When a lease's time is over, by what etcd says is left of it: whole seconds, rounded down, so the
    moment in which it is one less tells more. etcd renews no lease whose time is over: who ends it then takes
    nothing from its holder.

    `renewed`: since the first answer. `over`: its time is."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = math.floor(ttl_s)  # at least what a renewal gives
        self._asked = -math.inf  # when etcd was asked last
        # when it is surely over unless it is renewed, by all answers since it may have been, and by the
        # first one
        self._over_by = self._first = math.inf
        self.renewed = self.over = False

    def take(self, asked: float, answered: float, left_s: int) -> None:
        """etcd's answer to a question at `asked`."""
        certain = (
            self._ttl_s - (answered - self._asked) >= left_s + 1
        )  # a renewal since the last answer would leave more
        self.over = certain and left_s == 0 and asked >= self._over_by
        self.renewed = not self.over and asked + left_s > self._first
        over_by = answered + left_s + 1
        self._over_by = min(self._over_by, over_by) if certain else over_by
        if self._first == math.inf:
            self._first = over_by
        self._asked = asked
