"""The first writes of a term: each lands once, right after the last write of the term before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.store.writer import HeldLock, LockLost
from trireme_shared.platform.etcd import Compare, Etcd, Get, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import PeerError

PAUSE_S = 0.1

log = telemetry.logger("takeover")


async def write_first(etcd: Etcd, lock: HeldLock, commit: str, writes: Sequence[Put]) -> int:
    """Write under the lock, exactly once; the revision. `commit`: the key where each write of the lock's holders leaves its name.
    Raises LockLost.

    An attempt without an answer may land long after the term has begun. So each attempt compares `commit` and writes it: of
    several attempts one lands, and none after a later write. The last write of the term before may come in between: then the
    next attempt compares what that one wrote.
    """
    name = ids.new_id("takeover").encode()
    reads = [Get(lock.key), Get(commit)]

    def check() -> None:
        if not lock.lease.alive:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")

    async def landed(found: TxnResult) -> int:
        holder, marker = found.range(0).first, found.range(1).first
        if holder is None or holder.create_revision != lock.term:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")
        return marker.mod_revision if marker is not None and marker.value == name else 0

    found_at = await _revision_of(etcd, commit, check)
    while True:
        fence = [lock.compare(), Compare.mod(commit, "==", found_at)]
        write = FencedWrite(etcd, fence, [*writes, Put(commit, name)], reads, landed)
        outcome = await write.until_answered(check, PAUSE_S)
        if isinstance(outcome, int):
            return outcome
        marker = outcome.range(1).first
        found_at = marker.mod_revision if marker else 0


async def _revision_of(etcd: Etcd, commit: str, check: Callable[[], None]) -> int:
    """0 if the key does not exist. Repeated until etcd answers; `check` raises when it is too late."""
    while True:
        check()
        try:
            marker = await etcd.get(commit)
        except PeerError as error:
            log.warning("takeover_unanswered", cause=str(error))
            await asyncio.sleep(ids.jitter(PAUSE_S))
        else:
            return marker.mod_revision if marker else 0
