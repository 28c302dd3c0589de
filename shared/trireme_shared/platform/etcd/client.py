"""The client of all services: keys are text, values are bytes, every call has a deadline and typed errors.

    Etcd (deadline, retries of what is safe to retry) -> Transport (one attempt, endpoints) -> etcd | simulated etcd

Reads are repeated until the caller's deadline. A write is repeated only while it certainly did not reach etcd; after that
a lost answer is OutcomeUnknown, and the caller has to read back.

etcd's answers are linearizable: none has a revision below one that was known when its request was sent. If one has, etcd was
restored from an older state, and the call raises WentBack. A watch checks this before it resumes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress

from trireme_shared.platform.etcd.backoff import pauses
from trireme_shared.platform.etcd.errors import LeaseLost, OutcomeUnknown, Refused, Retryable, WentBack
from trireme_shared.platform.etcd.lease import Lease
from trireme_shared.platform.etcd.operations import Compare, Delete, Get, Operation, Put, check_size, interval, txn_body
from trireme_shared.platform.etcd.results import KeyValue, RangeResult, Space, TxnResult, WatchBatch
from trireme_shared.platform.etcd.transport import (
    COMPACT,
    DELETE,
    GRANT,
    KEEP_ALIVE,
    PUT,
    RANGE,
    REVOKE,
    STATUS,
    TIME_TO_LIVE,
    TXN,
    Body,
    Transport,
)
from trireme_shared.platform.etcd.watch import watch
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import PeerError

ATTEMPT_TIMEOUT_S = 2.0
TIMEOUT_S = 10.0
LINEARIZABLE = {RANGE, PUT, DELETE, TXN}


class Etcd:
    """All calls raise the errors of trireme_shared.platform.etcd.errors; `timeout_s` bounds all attempts of a call together.

    `silent_at`: when etcd last left the grant or the renewal of a lease of this process unanswered (seconds since boot). Leases of
    other processes may have run out at that time without their fault.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.silent_at = -math.inf
        self._revision = 0  # the highest in any answer

    # ------------------------------------------------------------ keys

    async def get(self, key: str, *, timeout_s: float = TIMEOUT_S) -> KeyValue | None:
        """The key now (linearizable), None if it does not exist."""
        return (await self.range(key, timeout_s=timeout_s)).first

    async def range(
        self,
        key: str,
        end: str | None = None,
        prefix: bool = False,
        limit: int = 0,
        count_only: bool = False,
        keys_only: bool = False,
        revision: int = 0,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> RangeResult:
        """Keys of [key, end), or with that prefix, or that key, in order. Raises Compacted for an old `revision`."""
        body = Get(key, end, prefix, limit, count_only, keys_only, revision).body()
        answer = await self._call(RANGE, body, timeout_s, key)
        return RangeResult.of(answer, answer["header"]["revision"])

    async def put(self, key: str, value: bytes, lease: int = 0, *, timeout_s: float = TIMEOUT_S) -> int:
        """Returns the revision. An unconditional write: for anything two processes may write, use `txn`."""
        check_size(len(key) + len(value), f"the put of {key}")
        answer = await self._call(PUT, Put(key, value, lease).body(), timeout_s, key)
        return int(answer["header"]["revision"])

    async def delete(
        self, key: str, end: str | None = None, prefix: bool = False, *, timeout_s: float = TIMEOUT_S
    ) -> int:
        """Returns how many keys were deleted."""
        answer = await self._call(DELETE, Delete(key, end, prefix).body(), timeout_s, key)
        return int(answer.get("deleted", 0))

    async def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> TxnResult:
        """If all `compares` hold do `success`, else `failure`; atomic. Raises OutcomeUnknown if the answer was lost."""
        body = txn_body(compares, success, failure)
        named = next((item.key for item in (*success, *compares, *failure)), "nothing")
        return TxnResult.of(await self._call(TXN, body, timeout_s, named))

    def watch(
        self, key: str, end: str | None = None, prefix: bool = False, start_revision: int = 0
    ) -> AsyncGenerator[WatchBatch, None]:
        """Batches of changes from `start_revision` on, without end; 0 starts with a snapshot (a `reset` batch).

        If the next revision was compacted meanwhile, a `reset` batch follows. An outage only delays batches. Raises WentBack.
        """
        first, last = interval(key, end, prefix)

        async def read() -> RangeResult:
            return await self.range(key, end, prefix)

        async def current() -> int:
            return (await self.range(key, count_only=True)).revision

        return watch(self.transport, read, current, (first, last), start_revision)

    async def space(self, *, timeout_s: float = TIMEOUT_S) -> Space:
        """How much the asked member has stored, and whether etcd takes no more writes for lack of space."""
        answer = await self._call(STATUS, {}, timeout_s, "space")
        alarms = [str(alarm) for alarm in answer.get("errors", ())]
        return Space(answer.get("dbSize", 0), full=any("NOSPACE" in alarm for alarm in alarms))

    async def compact(self, revision: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Delete the history before `revision`. Raises Compacted if that was done already."""
        await self._call(COMPACT, {"revision": revision, "physical": True}, timeout_s, f"revision {revision}")

    # ------------------------------------------------------------ leases

    async def grant(self, ttl_s: float, *, timeout_s: float = TIMEOUT_S) -> Lease:
        """A new lease of at least 2 s (etcd's minimum); run its `keep_alive()`."""
        sent = clock.since_boot()

        async def attempt(limit_s: float) -> Body:
            nonlocal sent
            sent = clock.since_boot()
            try:
                return await self.transport.call(GRANT, {"TTL": math.ceil(ttl_s)}, min(limit_s, ttl_s / 4))
            except (Retryable, OutcomeUnknown) as error:
                if not isinstance(error, Refused):
                    self._note_silence()
                raise

        # a lost answer leaves a lease that nobody renews: it expires
        answer = await _until_deadline(attempt, timeout_s, "lease/grant", (Retryable, OutcomeUnknown))
        return Lease(self.transport, self.revoke, answer["ID"], answer["TTL"], sent, self._note_silence)

    def _note_silence(self) -> None:
        self.silent_at = clock.since_boot()

    async def renew(self, lease_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Once, a lease that another process holds. One attempt. Raises LeaseLost if etcd does not have it any more."""
        answer = await self.transport.call(KEEP_ALIVE, {"ID": lease_id}, timeout_s)
        if answer.get("TTL", 0) <= 0:
            raise LeaseLost(f"lease {lease_id:x} is over")

    async def revoke(self, lease_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Delete the lease and its keys; a lease that is gone already is no error."""

        async def attempt(limit_s: float) -> Body:
            return await self.transport.call(REVOKE, {"ID": lease_id}, limit_s)

        with suppress(LeaseLost):
            await _until_deadline(attempt, timeout_s, f"lease/revoke {lease_id:x}", (Retryable, OutcomeUnknown))

    async def time_to_live(self, lease_id: int, *, timeout_s: float = TIMEOUT_S) -> int:
        """Whole seconds the lease has left by etcd's clock, -1 if it is gone."""
        answer = await self._call(TIME_TO_LIVE, {"ID": lease_id}, timeout_s, f"lease {lease_id:x}")
        return int(answer.get("TTL", 0))

    async def close(self) -> None:
        await self.transport.close()

    async def _call(self, method: str, body: Body, timeout_s: float, what: str) -> Body:
        async def attempt(limit_s: float) -> Body:
            before = self._revision
            answer = await self.transport.call(method, body, limit_s)
            if method in LINEARIZABLE:
                revision = answer["header"]["revision"]
                if revision < before:
                    raise WentBack.between(revision, before)
                self._revision = max(self._revision, revision)
            return answer

        return await _until_deadline(attempt, timeout_s, f"{method} of {what}", (Retryable,))


async def _until_deadline(
    attempt: Callable[[float], Awaitable[Body]], timeout_s: float, what: str, repeat: tuple[type[PeerError], ...]
) -> Body:
    """Repeat `attempt` on the errors in `repeat`, with jittered pauses, until it succeeds or `timeout_s` is over."""
    deadline = clock.monotonic() + timeout_s
    waits = pauses()
    while True:
        left = deadline - clock.monotonic()
        try:
            return await attempt(max(0.001, min(left, ATTEMPT_TIMEOUT_S)))
        except repeat as error:
            pause = next(waits)
            if clock.monotonic() + pause >= deadline:
                msg = f"etcd did not do {what} within {timeout_s:g} s; last: {error}"
                raise type(error)(msg, hint=error.hint) from error
            await asyncio.sleep(pause)
