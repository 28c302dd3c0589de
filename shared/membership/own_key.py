"""One leased key that only this process writes, kept equal to a wanted record.

    claim (create = 0) ─► hold: renew the lease, write what was `set` ─► key gone or another's: lost

When the lease is over by the local clock, `hold` asks etcd: a key that is still there gets a new lease, a key that is gone
or another process's is lost. While etcd does not answer, `hold` asks again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from shared.errors import PeerError, TriremeError
from shared.etcd import Compare, Etcd, KeyValue, Lease, LeaseLost, OutcomeUnknown, Put
from shared.etcd.reading import read_record
from shared.records import PserverMember, TrainerMember
from shared.runtime import clock, ids, telemetry

OUTAGE_S = 24 * 3600.0  # how long etcd may be away before the key counts as lost
PAUSE_S = 0.5
LOOK_ATTEMPT_S = 1.0  # of one look after the lease is over: a pserver serves nobody meanwhile
RELEASE_S = 2.0

R = TypeVar("R", PserverMember, TrainerMember)
log = telemetry.logger("own_key")


class OwnKey(Generic[R]):
    """`record`: the wanted value; its lease is filled in."""

    def __init__(self, etcd: Etcd, record: R) -> None:
        self.key = ""
        self.record: R = record
        self._etcd = etcd
        self._lease: Lease | None = None
        self._created = 0
        self._etcd_away = False
        self._released = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key or 'unclaimed'} of {self.record.incarnation}: {self._lease!r}>"

    @property
    def lease(self) -> Lease:
        """Raises LeaseLost before the claim."""
        if self._lease is None:
            raise LeaseLost("no key is claimed, so there is no lease")
        return self._lease

    @property
    def in_doubt(self) -> bool:
        """The lease is over by the local clock, and etcd was not yet asked whether the key is still this process's."""
        return self._lease is not None and not self._lease.alive and not self._etcd_away

    @property
    def held(self) -> Compare:
        """True while the key is this process's: compare it in every write that only the holder may do."""
        return Compare.create(self.key, "==", self._created)

    async def claim(self, key: str, ttl_s: float, **fields: Any) -> bool:
        """Create the key with these fields of the record; False if it exists. Raises PeerError: claim again."""
        lease = await self._etcd.grant(ttl_s)
        fields["lease"] = lease.id
        value = self.record.model_copy(update=fields).to_bytes()
        try:
            result = await self._etcd.txn([Compare.create(key, "==", 0)], [Put(key, value, lease.id)])
            taken, revision = result.succeeded, result.revision
        except OutcomeUnknown:
            found = await self._etcd.get(key)
            taken = found is not None and found.lease == lease.id
            revision = found.create_revision if found is not None else 0
        if not taken:
            await lease.revoke()
            return False
        self.record = self.record.model_copy(update=fields)
        self.key, self._lease, self._created = key, lease, revision
        return True

    async def hold(self) -> None:
        """Keep the key and its value; returns when it is lost or released. Run it in a TaskGroup."""
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._keep_value())
            lease = self._lease
            while lease is not None:
                await lease.keep_alive()
                lease = None if self._released else await self._renew_lease()
                self._etcd_away = self._etcd_away and lease is None
            writing.cancel()
        if not self._released:
            log.error("key_lost", key=self.key, incarnation=self.record.incarnation)

    def set(self, **fields: Any) -> None:
        """Change the wanted record; `hold` writes it, again while etcd is away."""
        self.record = self.record.model_copy(update=fields)
        self._changed.set()

    async def write(self, **fields: Any) -> bool:
        """Change the record and write it now; False: the key is lost. Raises PeerError, LeaseLost: the fields are what they
        were before, and whether etcd took them is unknown; write again."""
        before = self.record
        self.record = before.model_copy(update=fields)
        try:
            return await self._write_record()
        except (PeerError, LeaseLost):
            self.record = self.record.model_copy(update={name: getattr(before, name) for name in fields})
            raise

    async def release(self) -> None:
        """Give the key up at once; if etcd is away, its lease runs out by itself."""
        self._released = True
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._lease.revoke()
        except (TriremeError, TimeoutError) as error:
            log.warning("key_not_released", key=self.key, cause=str(error))

    # ------------------------------------------------------------ parts

    async def _keep_value(self) -> None:
        """Write each change; returns when the key is lost."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if not await self._write_record():
                    return
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", key=self.key, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()

    async def _write_record(self) -> bool:
        while True:
            found = await self._etcd.get(self.key)
            if found is None or not self._is_mine(found):
                return False
            if await self._replace(found, self.lease):
                return True

    async def _renew_lease(self) -> Lease | None:
        """A new lease under the key if it is still this process's, None if it is not."""
        deadline = clock.monotonic() + OUTAGE_S
        while clock.monotonic() < deadline:
            try:
                found = await self._etcd.get(self.key, timeout_s=LOOK_ATTEMPT_S)
                if found is None or not self._is_mine(found):
                    return None
                lease = await self._etcd.grant(self.lease.ttl_s)
                if await self._replace(found, lease):
                    log.info("lease_replaced", key=self.key, lease=f"{lease.id:x}")
                    self.record, self._lease = self.record.model_copy(update={"lease": lease.id}), lease
                    return lease
            except (PeerError, LeaseLost) as error:
                self._etcd_away = True
                log.warning("etcd_away", key=self.key, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return None

    async def _replace(self, found: KeyValue, lease: Lease) -> bool:
        """Write the record over `found`; False if the key has changed since."""
        value = self.record.model_copy(update={"lease": lease.id}).to_bytes()
        # mod, not create: an attempt without an answer that arrives late would put an old value and an old lease back
        same = Compare.mod(self.key, "==", found.mod_revision)
        return (await self._etcd.txn([same], [Put(self.key, value, lease.id)])).succeeded

    def _is_mine(self, found: KeyValue) -> bool:
        record = read_record(type(self.record), found.key, found.value)
        mine = record is not None and record.incarnation == self.record.incarnation
        return mine and found.create_revision == self._created
