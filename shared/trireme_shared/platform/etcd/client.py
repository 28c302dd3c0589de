"""The client of all services, its watches and its leases: keys are text, values are bytes, every call has a
deadline and typed errors.

    Etcd (deadline, retries of what is safe to retry) -> Transport (one attempt, endpoints)
        -> etcd | simulated etcd

Reads are repeated until the caller's deadline. A write is repeated only while it certainly did not reach
etcd; after that a lost answer is OutcomeUnknown, and the caller has to read back.

etcd's answers are linearizable: none has a revision below one that was known when its request was sent. If
one has, etcd was restored from an older state, and the call raises WentBack. A watch checks this before it
resumes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress

from trireme_shared.platform.etcd.errors import (
    Compacted,
    LeaseLost,
    OutcomeUnknown,
    Refused,
    Retryable,
    WentBack,
)
from trireme_shared.platform.etcd.operations import (
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
    WATCH,
    Body,
    Compare,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    RangeResult,
    Space,
    Transport,
    TxnResult,
    WatchBatch,
    WatchEvent,
    check_size,
    interval,
    txn_body,
)
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import PeerError, TriremeError

ATTEMPT_TIMEOUT_S = 2.0
TIMEOUT_S = 10.0
LINEARIZABLE = {RANGE, PUT, DELETE, TXN}


class Etcd:
    """All calls raise the errors of trireme_shared.platform.etcd.errors; `timeout_s` bounds all attempts of a
    call together.

    `silent_at`: when etcd last left the grant or the renewal of a lease of this process unanswered (seconds
    since boot). Leases of other processes may have run out at that time without their fault.
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
        """Keys of [key, end), or with that prefix, or that key, in order. Raises Compacted for an old
        `revision`."""
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
        """If all `compares` hold do `success`, else `failure`; atomic. Raises OutcomeUnknown if the answer
        was lost."""
        body = txn_body(compares, success, failure)
        named = next((item.key for item in (*success, *compares, *failure)), "nothing")
        return TxnResult.of(await self._call(TXN, body, timeout_s, named))

    def watch(
        self, key: str, end: str | None = None, prefix: bool = False, start_revision: int = 0
    ) -> AsyncGenerator[WatchBatch, None]:
        """Batches of changes from `start_revision` on, without end; 0 starts with a snapshot (a `reset`
        batch).

        If the next revision was compacted meanwhile, a `reset` batch follows. An outage only delays batches.
        Raises WentBack.
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
        """Once, a lease that another process holds. One attempt. Raises LeaseLost if etcd does not have it
        any more."""
        answer = await self.transport.call(KEEP_ALIVE, {"ID": lease_id}, timeout_s)
        if answer.get("TTL", 0) <= 0:
            raise LeaseLost(f"lease {lease_id:x} is over")

    async def revoke(self, lease_id: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Delete the lease and its keys; a lease that is gone already is no error."""

        async def attempt(limit_s: float) -> Body:
            return await self.transport.call(REVOKE, {"ID": lease_id}, limit_s)

        with suppress(LeaseLost):
            await _until_deadline(
                attempt, timeout_s, f"lease/revoke {lease_id:x}", (Retryable, OutcomeUnknown)
            )

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
    attempt: Callable[[float], Awaitable[Body]],
    timeout_s: float,
    what: str,
    repeat: tuple[type[PeerError], ...],
) -> Body:
    """Repeat `attempt` on the errors in `repeat`, with jittered pauses, until it succeeds or `timeout_s` is
    over."""
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


def pauses() -> Iterator[float]:
    """The pause before each next attempt, in seconds: doubling from 50 ms to 1 s, each cut by up to half."""
    pause_s = 0.05
    while True:
        yield ids.jitter(pause_s)
        pause_s = min(2 * pause_s, 1.0)


PROGRESS_INTERVAL_S = 1.0  # of an etcd with --experimental-watch-progress-notify-interval 1s
IDLE_LIMIT_S = 3 * PROGRESS_INTERVAL_S  # once notifications came so often
CREATED_LIMIT_S = 10.0  # etcd answers a new watch at once, whatever it will send later

watch_log = telemetry.logger("etcd.watch")


async def watch(
    transport: Transport,
    read: Callable[[], Awaitable[RangeResult]],
    current: Callable[[], Awaitable[int]],
    interval: tuple[bytes, bytes],
    start_revision: int,
) -> AsyncGenerator[WatchBatch, None]:
    """Batches of events of `interval` from `start_revision` on, without end; 0: a snapshot first, as a reset
    batch.

        snapshot -> events -> (broken: resume | compacted: new snapshot) -> events ...

    It resumes at the last event's mod_revision + 1 (or the last progress notification's revision + 1), so no
    event is lost or seen twice. An etcd that notifies of progress every second (the embedded one does) is
    missed after three seconds. By default etcd does so every ten minutes: then the transport tells a quiet
    stream from a dead one. Before it resumes it checks etcd's revision: an etcd restored from an older backup
    would send nothing for a long time.

    `read` gives a snapshot of the interval, `current` etcd's revision. Errors are logged and the watch goes
    on; it ends only by closing, cancelling or WentBack.
    """
    due, broken = start_revision, False
    waits = pauses()
    health = _Health(interval[0].decode("utf-8", "replace"))
    while True:
        try:
            if due <= 0:
                snapshot = await read()
                due = snapshot.revision + 1
                yield WatchBatch(snapshot.revision, reset=True, kvs=snapshot.kvs)
            elif broken and (now := await current()) < due - 1:
                raise WentBack.between(now, due - 1)
            broken = True
            limit_s: float | None = CREATED_LIMIT_S
            heard = clock.monotonic()
            async with aclosing(transport.stream(WATCH, _request(interval, due))) as messages:
                while True:
                    message = await _next(messages, limit_s)
                    _refuse_cancelled(message)
                    before, heard = heard, clock.monotonic()
                    waits = pauses()
                    health.good(due)
                    events = tuple(
                        [
                            WatchEvent.of(e)
                            for e in message.get("events", ())
                            if e["kv"].get("mod_revision", 0) >= due
                        ]
                    )
                    if message.get("created"):
                        limit_s = None
                    if events:
                        revision = events[-1].kv.mod_revision
                        due = revision + 1
                        yield WatchBatch(revision, events)
                    elif not message.get("created") and "events" not in message:
                        limit_s = IDLE_LIMIT_S if heard - before <= IDLE_LIMIT_S else limit_s
                        due = max(due, message["header"]["revision"] + 1)
        except Compacted as error:
            watch_log.warning("watch_compacted", key=health.key, due=due, cause=str(error))
            due = 0
        except WentBack:
            raise
        except TriremeError as error:
            health.bad(due, str(error))
        await asyncio.sleep(next(waits))


async def _next(messages: AsyncGenerator[Body, None], limit_s: float | None) -> Body:
    try:
        async with asyncio.timeout(limit_s):
            message = await anext(messages, None)
    except TimeoutError:
        msg = f"etcd sent nothing in {limit_s} s"
        raise Retryable(msg) from None
    if message is None:
        raise Retryable("etcd ended the watch")
    return message


class _Health:
    """Logs when the watch breaks and when it works again, not each attempt in between."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._broken = False

    def good(self, due: int) -> None:
        if self._broken:
            self._broken = False
            watch_log.info("watch_resumed", key=self.key, due=due)

    def bad(self, due: int, cause: str) -> None:
        report = watch_log.debug if self._broken else watch_log.warning
        self._broken = True
        report("watch_broken", key=self.key, due=due, cause=cause)


def _request(interval: tuple[bytes, bytes], start_revision: int) -> Body:
    first, end = interval
    create: Body = {"key": first, "start_revision": start_revision, "progress_notify": True}
    if end:
        create["range_end"] = end
    return {"create_request": create}


def _refuse_cancelled(message: Body) -> None:
    if not message.get("canceled"):
        return
    if compact_revision := message.get("compact_revision", 0):
        msg = f"the watch needs a revision below {compact_revision}, which was compacted"
        raise Compacted(msg, compact_revision=compact_revision)
    raise Retryable(f"etcd cancelled the watch: {message.get('cancel_reason', 'no reason given')}")


MARGIN = 0.1  # of the TTL: clock rates differ, and the holder needs time to stop
ATTEMPT_LIMIT_S = 2.0
HELD_UP_S = 1.0

log = telemetry.logger("etcd.lease")


class Lease:
    """A lease that fences itself: `alive` and `lost` follow the local clock, not only etcd's answers.

        granted --keep_alive: renewed every TTL/3--> alive ...
            --no renewal until the deadline, or etcd says it is gone--> lost

    The deadline is the time *before* the last successful renewal was sent + TTL - margin, so it lies before
    any moment at which etcd may give the role to another process. A lost lease stays lost: a new role needs a
    new lease. Time during which the machine is suspended counts, as it does in etcd on another machine.
    `revoked`: etcd ended it before its time.

    Made by `Etcd.grant`. Run `keep_alive()` in a TaskGroup; end the role when `lost` is set. `on_silence` is
    called when a renewal was left unanswered.
    """

    def __init__(
        self,
        transport: Transport,
        revoke: Callable[[int], Awaitable[None]],
        lease_id: int,
        ttl_s: float,
        sent: float,
        on_silence: Callable[[], None],
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.revoked = False
        self._on_silence = on_silence
        self._transport = transport
        self._revoke = revoke
        self._sent = sent
        self._deadline = sent
        self._timer: asyncio.TimerHandle | None = None
        self._renewed(sent, ttl_s)

    def __repr__(self) -> str:
        state = f"alive for {self.remaining_s:.1f} s" if self.alive else "lost"
        return f"<Lease {self.id:x}: ttl {self.ttl_s:g} s, {state}>"

    @property
    def alive(self) -> bool:
        """Whether the holder may still act on it, by the local clock."""
        return not self.lost.is_set() and clock.since_boot() < self._deadline

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.lost.is_set() else max(0.0, self._deadline - clock.since_boot())

    @property
    def held_s(self) -> float:
        """So long etcd may still keep what depends on it, if it is not renewed any more: others wait for
        that."""
        return 0.0 if self.revoked else max(0.0, self._sent + self.ttl_s - clock.since_boot())

    @property
    def unrenewed_s(self) -> float:
        """Since the last successful renewal was sent."""
        return clock.since_boot() - self._sent

    def check(self) -> None:
        """Raises LeaseLost unless alive: call it right before acting on the role."""
        if not self.alive:
            msg = (
                f"lease {self.id:x} (ttl {self.ttl_s:g} s) is lost; the role it carried is over, "
                "register again"
            )
            raise LeaseLost(msg)

    async def keep_alive(self) -> None:
        """Renew until the lease is lost, then return. Errors do not end it."""
        attempt_s = min(ATTEMPT_LIMIT_S, self.ttl_s / 4)
        due = self._sent + self.ttl_s / 3
        while not self.lost.is_set():
            if (left_s := due - clock.since_boot()) > 0:
                await event_within(self.lost, left_s)
            if self.lost.is_set():
                return
            sent = clock.since_boot()
            try:
                answer = await self._transport.call(KEEP_ALIVE, {"ID": self.id}, attempt_s)
            except LeaseLost as error:
                self._note_revoked()
                self._lose(f"etcd does not know it: {error}")
                return
            except TriremeError as error:
                if not isinstance(error, Refused):
                    self._on_silence()
                log.warning(
                    "renewal_failed", lease=f"{self.id:x}", cause=str(error), remaining_s=self.remaining_s
                )
                due = clock.since_boot() + ids.jitter(min(0.5, self.ttl_s / 10))
                continue
            except Exception:
                log.exception("renewal_failed", lease=f"{self.id:x}", remaining_s=self.remaining_s)
                due = clock.since_boot() + ids.jitter(min(0.5, self.ttl_s / 10))
                continue
            ttl_s = answer.get("TTL", 0)
            if ttl_s <= 0:
                self._note_revoked()
                self._lose("etcd did not renew it: it expired or was revoked")
            elif not self.lost.is_set():
                self._renewed(sent, ttl_s)
            due = sent + self.ttl_s / 3

    async def revoke(self) -> None:
        """End the role at once: etcd deletes the keys of the lease. Sets `lost`; does no harm if it is lost
        already."""
        self._end()
        await self._revoke(self.id)

    def _renewed(self, sent: float, ttl_s: float) -> None:
        self._sent = sent
        self._deadline = sent + ttl_s * (1 - MARGIN)
        if self._timer is None:
            self._set_timer()

    def _on_deadline(self) -> None:
        """The timer is set once and moved only when it fires, so renewals cost nothing."""
        self._timer = None
        if self.lost.is_set():
            return
        if clock.since_boot() < self._deadline:
            self._set_timer()
        else:
            self._on_silence()
            cause = f"no renewal succeeded within {self.ttl_s * (1 - MARGIN):g} s"
            if (late_s := clock.since_boot() - self._deadline) > HELD_UP_S:
                cause += (
                    f"; this process did not run for {late_s:.0f} s at least: it was frozen, or a call "
                    "kept Python's interpreter"
                )
            self._lose(cause)

    def _set_timer(self) -> None:
        at = self._deadline - clock.suspended_s()
        self._timer = asyncio.get_running_loop().call_at(at, self._on_deadline)

    def _note_revoked(self) -> None:
        """etcd does not have it, although it is not over by the local clock."""
        self.revoked = self.alive

    def _lose(self, cause: str) -> None:
        if not self.lost.is_set():
            log.error("lease_lost", lease=f"{self.id:x}", ttl_s=self.ttl_s, cause=cause)
            self._end()

    def _end(self) -> None:
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
