"""The place of a pserver among its peers: `ps/<index>` in etcd, under a lease.

    wait for ps_desired and a free index --> claim (create = 0) --> hold ... key gone or another's --> lost: stop serving, exit
                                                                      `---- fewer are desired --> give it back, exit

A lease is a hint of life. When it is over by the local clock the pserver answers nobody until it has looked: it may have slept
while another took its index. Its key still there means it takes a new lease, its key gone means it is out; etcd away means it
goes on serving (pushes are fenced by generation, and nobody takes an index meanwhile) and looks until etcd is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import DeadlineExceeded, PeerError
from shared.etcd import Compare, Etcd, KeyValue, Lease, LeaseLost, OutcomeUnknown, Put
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import PserverMember, Restored
from shared.runtime import clock, ids, telemetry

OUTAGE_S = 24 * 3600.0  # how long etcd may be away before a pserver gives up
PAUSE_S = 0.5
LOOK_S = 5.0
LOOK_ATTEMPT_S = 1.0  # of one look after the lease is over: nobody is served meanwhile
RELEASE_S = 2.0

log = telemetry.logger("pserver.registration")


def lowest_free(desired: int, taken: Mapping[int, PserverMember]) -> int | None:
    return next((index for index in range(desired) if index not in taken), None)


class Registration:
    """`member`: what the key will say; index and lease are filled in. Run `directory` beside it."""

    def __init__(self, etcd: Etcd, keys: Keys, directory: Directory, member: PserverMember) -> None:
        self._etcd = etcd
        self._keys = keys
        self._directory = directory
        self.member = member
        self._lease: Lease | None = None
        self._created = 0
        self._etcd_away = False

    def __repr__(self) -> str:
        return f"<Registration of {self.member.incarnation} as {self.member.index}: {self._lease!r}>"

    async def claim(self, wait_s: float) -> int:
        """The index taken: the lowest free one. Raises DeadlineExceeded after `wait_s`."""
        deadline = clock.monotonic() + wait_s
        while True:
            await self._directory.wait_for(
                lambda seen: seen.spec is not None and seen.pservers_desired is not None,
                deadline - clock.monotonic(),
                "job/spec and ps_desired",
            )
            desired = self._directory.pservers_desired or 0
            await self._directory.wait_for(
                lambda seen: lowest_free(seen.pservers_desired or 0, seen.pservers) is not None,
                deadline - clock.monotonic(),
                f"a free place among {desired} pservers",
            )
            index = lowest_free(self._directory.pservers_desired or 0, self._directory.pservers)
            if index is not None and await self._take(index):
                log.info("index_claimed", index=index, url=self.member.url, uds=self.member.uds)
                return index
            await self._directory.changed(self._directory.revision, PAUSE_S)
            if clock.monotonic() >= deadline:
                msg = f"waited {wait_s:g} s for a free place among {desired} pservers: others were faster each time"
                raise DeadlineExceeded(msg)

    async def hold(self) -> None:
        """Keep the claimed index; returns when it is lost. Run it in a TaskGroup."""
        lease = self._lease
        while lease is not None:
            await lease.keep_alive()
            lease = await self._renew_claim()
            self._etcd_away = False
        log.error("index_lost", index=self.member.index, incarnation=self.member.incarnation)

    async def unwanted(self) -> None:
        """Returns when the job wants fewer parameter servers than it has indices up to this one: it was begun again with
        fewer after this one had claimed a place among as many as before, so lower ones may be free."""
        while True:
            revision, desired = self._directory.revision, self._directory.pservers_desired
            if desired is not None and self.member.index >= desired:
                log.warning("index_not_wanted", index=self.member.index, desired=desired)
                return
            await self._directory.changed(revision, LOOK_S)

    @property
    def lease(self) -> Lease:
        """Of the claimed index. Raises LeaseLost before the claim."""
        if self._lease is None:
            raise LeaseLost("no index is claimed, so there is no lease")
        return self._lease

    @property
    def in_doubt(self) -> bool:
        """The lease is over by the local clock, and etcd was not yet asked whether the index is still this process's."""
        return self._lease is not None and not self._lease.alive and not self._etcd_away

    @property
    def held(self) -> Compare:
        """Holds while the index is this process's: compare it in every write that only its holder may do."""
        return Compare.create(self._keys.pserver(self.member.index), "==", self._created)

    async def tell(self, **said: Any) -> bool:
        """Write fields of PserverMember into the key (what became of a roll-back, which checkpoint is copied); False if
        the index is lost. Raises PeerError: try again."""
        key = self._keys.pserver(self.member.index)
        while True:
            found = await self._etcd.get(key)
            if found is None or not self._is_mine(found) or found.create_revision != self._created:
                return False
            member = self.member.model_copy(update=said)
            put = Put(key, member.to_bytes(), self.lease.id)
            # mod, as in _renew_claim: a late attempt must not put a forgotten lease back
            if (await self._etcd.txn([Compare.mod(key, "==", found.mod_revision)], [put])).succeeded:
                self.member = self.member.model_copy(update=said)
                return True

    async def answer(self, restored: Restored, is_current: Callable[[], bool]) -> None:
        """Tell what became of a roll-back or a return, again while etcd is away, as long as `is_current()`."""
        while is_current():
            try:
                await self.tell(restored=restored, waits="")
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", index=self.member.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
            else:
                return

    async def release(self) -> None:
        """Give the index back at once; if etcd is away the lease runs out by itself."""
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._lease.revoke()
        except (PeerError, TimeoutError) as error:
            log.warning("index_not_released", index=self.member.index, cause=str(error))

    async def _take(self, index: int) -> bool:
        assert self._directory.spec is not None
        lease = await self._etcd.grant(self._directory.spec.lease_ttl_s)
        member = self.member.model_copy(update={"index": index, "lease": lease.id})
        key = self._keys.pserver(index)
        try:
            result = await self._etcd.txn([Compare.create(key, "==", 0)], [Put(key, member.to_bytes(), lease.id)])
            taken, revision = result.succeeded, result.revision
        except OutcomeUnknown:
            found = await self._etcd.get(key)
            taken = found is not None and self._is_mine(found)
            revision = found.create_revision if found is not None else 0
        if not taken:
            await lease.revoke()
            return False
        self.member, self._lease, self._created = member, lease, revision
        return True

    async def _renew_claim(self) -> Lease | None:
        """A new lease under the key if it is still this process's, None if it is not."""
        key = self._keys.pserver(self.member.index)
        deadline = clock.monotonic() + OUTAGE_S
        while clock.monotonic() < deadline:
            try:
                found = await self._etcd.get(key, timeout_s=LOOK_ATTEMPT_S)
                if found is None or not self._is_mine(found) or found.create_revision != self._created:
                    return None
                lease = await self._etcd.grant(self._lease.ttl_s if self._lease else 5.0)
                member = self.member.model_copy(update={"lease": lease.id})
                put = Put(key, member.to_bytes(), lease.id)
                # mod, not create: an attempt without an answer that lands late would put its forgotten lease back
                if (await self._etcd.txn([Compare.mod(key, "==", found.mod_revision)], [put])).succeeded:
                    log.info("lease_replaced", index=self.member.index, lease=f"{lease.id:x}")
                    self.member, self._lease = self.member.model_copy(update={"lease": lease.id}), lease
                    return lease
            except (PeerError, LeaseLost) as error:
                self._etcd_away = True
                log.warning("etcd_away", index=self.member.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
        return None

    def _is_mine(self, found: KeyValue) -> bool:
        member = read_record(PserverMember, found.key, found.value)
        return member is not None and member.incarnation == self.member.incarnation
