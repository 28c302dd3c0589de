"""A trainer's place among the members: `trainers/<id>` in etcd, under a lease.

    register (create = 0) ─► hold ... key gone ─► lost: exit, come back as somebody new

While etcd is away the lease ends by the local clock, but training goes on: what a trainer does is fenced by generation.
Once etcd answers again, a key that is still there gets a new lease, and a key that is gone means that the others went on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shared.errors import PeerError, TriremeError
from shared.etcd import Compare, Etcd, Lease, LeaseLost, OutcomeUnknown, Put
from shared.keys import Keys
from shared.records import TrainerMember
from shared.runtime import clock, ids, telemetry
from trainer_agent.waiting.retry import retry

OUTAGE_S = 24 * 3600.0  # how long etcd may be away before a trainer gives up
PAUSE_S = 0.5
LEAVE_S = 2.0

log = telemetry.logger("membership")


class Membership:
    """`member`: what the key says; its lease is filled in."""

    def __init__(self, etcd: Etcd, keys: Keys, member: TrainerMember, ttl_s: float) -> None:
        self._etcd, self._key, self._ttl_s = etcd, keys.trainer(member.trainer), ttl_s
        self.member = member
        self._lease: Lease | None = None
        self._created = 0
        self._leaving = False

    def __repr__(self) -> str:
        return f"<Membership of {self.member.trainer}: {self._lease!r}>"

    @property
    def lease_id(self) -> int:
        return self._lease.id if self._lease else 0

    async def register(self) -> None:
        """Raises DeadlineExceeded."""
        await retry(self._try_register, "registering in etcd")
        log.info("registered", trainer=self.member.trainer, lease=f"{self.lease_id:x}")

    async def hold(self) -> None:
        """Keep the place; returns when it is lost. Run it in a TaskGroup."""
        lease = self._lease
        while lease is not None:
            await lease.keep_alive()
            if self._leaving:
                return
            lease = await self._renew()
        log.error("membership_lost", trainer=self.member.trainer)

    async def tell(self, **said: Any) -> bool:
        """Write fields of TrainerMember into the key; False if the place is lost. Raises PeerError: try again."""
        while True:
            found = await self._etcd.get(self._key)
            if found is None or found.create_revision != self._created:
                return False
            member = self.member.model_copy(update=said)
            put = Put(self._key, member.to_bytes(), self.lease_id)
            # mod, as in _renew: a late attempt must not put a forgotten lease back
            if (await self._etcd.txn([Compare.mod(self._key, "==", found.mod_revision)], [put])).succeeded:
                self.member = self.member.model_copy(update=said)
                return True

    async def leave(self) -> None:
        """Give the place up at once; if etcd is away the lease runs out by itself."""
        self._leaving = True
        if self._lease is None or not self._lease.alive:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._lease.revoke()
        except (TriremeError, TimeoutError) as error:
            log.warning("lease_left", cause=str(error))

    async def _try_register(self) -> None:
        lease = await self._etcd.grant(self._ttl_s)
        member = self.member.model_copy(update={"lease": lease.id})
        try:
            put = Put(self._key, member.to_bytes(), lease.id)
            taken = await self._etcd.txn([Compare.create(self._key, "==", 0)], [put])
            succeeded, revision = taken.succeeded, taken.revision
        except OutcomeUnknown:
            found = await self._etcd.get(self._key)
            succeeded, revision = found is not None and found.lease == lease.id, found.create_revision if found else 0
        if not succeeded:
            await lease.revoke()
            raise PeerError(f"{self._key} is taken: a registration of which no answer came; it runs out")
        self.member, self._lease, self._created = member, lease, revision

    async def _renew(self) -> Lease | None:
        """A new lease under the key if it is still there, None if it is not."""
        deadline = clock.monotonic() + OUTAGE_S
        while clock.monotonic() < deadline:
            try:
                found = await self._etcd.get(self._key)
                if found is None or found.create_revision != self._created:
                    return None
                lease = await self._etcd.grant(self._ttl_s)
                member = self.member.model_copy(update={"lease": lease.id})
                put = Put(self._key, member.to_bytes(), lease.id)
                # mod, not create: an attempt without an answer that lands late would put its forgotten lease back
                if (await self._etcd.txn([Compare.mod(self._key, "==", found.mod_revision)], [put])).succeeded:
                    log.info("lease_replaced", trainer=self.member.trainer, lease=f"{lease.id:x}")
                    self.member, self._lease = member, lease
                    return lease
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return None
