"""The leader ends a member's registration: only while it holds its lock, and only the very registration that it means.

lock held, key under that lease --one transaction--> key deleted --> lease revoked, with whatever else it holds
   |           `-- key under another lease: it belongs to a newer registration, nothing is done
   `-- lock lost: LockLost
"""

from __future__ import annotations

from functools import partial

from master_service.store.writer import ATTEMPT_S, PAUSE_S, HeldLock, LockLost
from shared.errors import DeadlineExceeded, PeerError
from shared.etcd import Compare, Delete, Etcd, Get, TxnResult
from shared.etcd.fenced_write import FencedWrite
from shared.keys import Keys
from shared.records import PserverMember, TrainerMember
from shared.runtime import clock, telemetry

LIMIT_S = 10.0

log = telemetry.logger("evictions")


class Evictions:
    """`lock` None: of a trainer of a masterless job that does not sweep; it ends only members that it knows to be dead. `ended`: names
    of members whose registration was ended."""

    def __init__(self, etcd: Etcd, keys: Keys, lock: HeldLock | None) -> None:
        self._etcd, self._keys, self._lock = etcd, keys, lock
        self.ended: set[str] = set()

    async def end(self, member: TrainerMember | PserverMember, cause: str) -> bool:
        """Whether that registration is over now. Raises LockLost; DeadlineExceeded if etcd does not answer."""
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
            raise LockLost("the leader's lease ran out before it could end a member's registration; ask its successor")
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
