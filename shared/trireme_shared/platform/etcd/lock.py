"""The fenced lock: whoever creates the key holds it, and the key's create_revision is the fencing token.

    create(key) == 0 -> put(key, value, lease)  => held, token = revision of that put, larger than any token before
    else wait for the DELETE (with jitter), at most RECHECK_S, and try again

Holding it is only a belief until a write proves it: compare `Compare.create(key, "==", token)` in every transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from trireme_shared.platform.etcd.client import Etcd
from trireme_shared.platform.etcd.errors import OutcomeUnknown, Retryable
from trireme_shared.platform.etcd.fenced_write import FencedWrite
from trireme_shared.platform.etcd.lease import Lease
from trireme_shared.platform.etcd.operations import Compare, Get, Put
from trireme_shared.platform.etcd.results import KeyValue, TxnResult
from trireme_shared.platform.runtime import ids, telemetry

RECHECK_S = 5.0
JITTER_S = 0.05

log = telemetry.logger("etcd.lock")


async def try_acquire(etcd: Etcd, key: str, value: bytes, lease: Lease, *, timeout_s: float = 10.0) -> int | KeyValue:
    """One attempt: the token if `lease` holds the lock now, else the holder's key.

    Raises LeaseLost if the lease is no more, OutcomeUnknown if etcd lost the answer (try again: a lock that was
    taken by the lost request is recognised by its lease).
    """
    lease.check()

    async def landed(found: TxnResult) -> int:
        holder = _holder(key, found)
        return holder.create_revision if holder.lease == lease.id else 0

    fence, put = [Compare.create(key, "==", 0)], [Put(key, value, lease.id)]
    outcome = await FencedWrite(etcd, fence, put, [Get(key)], landed, timeout_s).attempt()
    if isinstance(outcome, int):
        lease.check()
        return outcome
    return _holder(key, outcome)


def _holder(key: str, found: TxnResult) -> KeyValue:
    holder = found.range(0).first
    assert holder is not None, f"{key} exists by compare and is missing by read in one transaction"
    return holder


async def acquire(
    etcd: Etcd,
    key: str,
    value: bytes,
    lease: Lease,
    *,
    on_wait: Callable[[KeyValue], Awaitable[None]] | None = None,
) -> int:
    """Wait until `lease` holds the lock and return its token. Raises LeaseLost when the lease is lost before.

    `on_wait(holder)` is awaited each time before waiting: a candidate may probe the holder there and revoke its lease.
    """
    while True:
        try:
            taken = await try_acquire(etcd, key, value, lease)
        except (OutcomeUnknown, Retryable) as error:
            log.warning("lock_attempt_failed", key=key, cause=str(error))
            await asyncio.sleep(ids.jitter(JITTER_S))
            continue
        if isinstance(taken, int):
            return taken
        if on_wait is not None:
            await on_wait(taken)
        await _until_free(etcd, key, lease)
        await asyncio.sleep(ids.jitter(JITTER_S))


async def _until_free(etcd: Etcd, key: str, lease: Lease) -> None:
    """Until the holder's key is deleted, the lease is lost, or RECHECK_S is over. It looks first: the revision at which the holder came
    may be compacted."""
    limit_s = min(RECHECK_S, max(lease.remaining_s, 0.001))
    watch = etcd.watch(key)
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s), aclosing(watch) as batches:
            async for batch in batches:
                if (batch.reset and not batch.kvs) or any(event.type == "delete" for event in batch.events):
                    return
