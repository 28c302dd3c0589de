"""Writes that depend on a role: the lock that gives it, and a write that lands once at most.

acquire ─► token: the create-revision of the lock's key
    ─► FencedWrite compares it: whoever lost the lock writes nothing more
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from trireme_shared.platform.etcd.client import TIMEOUT_S, Etcd, Lease
from trireme_shared.platform.etcd.errors import OutcomeUnknown, Retryable
from trireme_shared.platform.etcd.operations import Compare, Delete, Get, KeyValue, Put, TxnResult
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.protocol.errors import PeerError

RECHECK_S = 5.0
JITTER_S = 0.05

log = telemetry.logger("etcd.lock")


async def try_acquire(
    etcd: Etcd, key: str, value: bytes, lease: Lease, *, timeout_s: float = 10.0
) -> int | KeyValue:
    """Tries once to take the lock: whoever creates the key holds it, and the key's create_revision is the
    fencing token.

        create(key) == 0 -> put(key, value, lease)  => held, token = revision of that put, larger than any
                                                    token before
        else wait for the DELETE (with jitter), at most RECHECK_S, and try again

    Holding it is only a belief until a write proves it: compare `Compare.create(key, "==", token)` in every
    transaction.

    Returns the token if `lease` holds the lock now, else the holder's key.

    Raises LeaseLost if the lease is no more, OutcomeUnknown if etcd lost the answer (try again: a lock that
    was taken by the lost request is recognised by its lease).
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

    `on_wait(holder)` is awaited each time before waiting: a candidate may probe the holder there and revoke
    its lease.
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
    """Until the holder's key is deleted, the lease is lost, or RECHECK_S is over. It looks first: the
    revision at which the holder came may be compacted."""
    limit_s = min(RECHECK_S, max(lease.remaining_s, 0.001))
    watch = etcd.watch(key)
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s), aclosing(watch) as batches:
            async for batch in batches:
                if (batch.reset and not batch.kvs) or any(event.type == "delete" for event in batch.events):
                    return


write_log = telemetry.logger("etcd.fenced_write")


@dataclass(frozen=True, slots=True)
class FencedWrite:
    """A write that lands once at most, though answers get lost.

    txn(fence, writes) --landed--> its revision
       ^        |
       |        +--refused: read back--> an earlier attempt had landed: its revision
       |        |                        else what was read: the caller decides
       +--------+--no answer: pause, then send the very same again

    Repeating is safe because the write changes what its fence compares: of all attempts, one lands at most.

    `landed(what `reads` found)` answers the revision at which an earlier attempt landed, or 0.

    `on_error` is told why there is no answer yet; without it the log is, at first and then ever more rarely.
    `reads` are part of the transaction, taken when it is refused; with `read_apart` they are a second one
    after a refusal, so that the write itself stays as small as it can be.
    """

    etcd: Etcd
    fence: Sequence[Compare]
    writes: Sequence[Put | Delete]
    reads: Sequence[Get]
    landed: Callable[[TxnResult], Awaitable[int]]
    timeout_s: float = TIMEOUT_S
    read_apart: bool = False
    on_error: Callable[[PeerError], None] | None = None

    async def attempt(self) -> int | TxnResult:
        """The revision at which it landed, or what was read. Raises OutcomeUnknown, Retryable: attempt it
        again."""
        return await self._outcome(await self._send())

    async def until_answered(self, check: Callable[[], None], pause_s: float) -> int | TxnResult:
        """As `attempt`, repeated until there is an answer. `check` raises when it must not be sent any
        more."""
        failures, notices = 0, Notices()
        while True:
            check()
            try:
                result = await self._send()
            except PeerError as error:
                failures += 1
                if self.on_error is not None:
                    self.on_error(error)
                elif notices.due(clock.monotonic()):
                    write_log.warning("write_unanswered", cause=str(error), attempts=failures)
                await asyncio.sleep(ids.jitter(pause_s))
                continue
            if notices.over():
                write_log.info("write_answered", attempts=failures + 1)
            return await self._outcome(result)

    async def _send(self) -> TxnResult:
        if not self.read_apart:
            return await self.etcd.txn(self.fence, self.writes, self.reads, self.timeout_s)
        result = await self.etcd.txn(self.fence, self.writes, timeout_s=self.timeout_s)
        if result.succeeded:
            return result
        return replace(await self.etcd.txn((), self.reads, timeout_s=self.timeout_s), succeeded=False)

    async def _outcome(self, result: TxnResult) -> int | TxnResult:
        return result.revision if result.succeeded else await self.landed(result) or result
