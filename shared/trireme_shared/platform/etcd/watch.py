"""A watch without end: snapshot -> events -> (broken: resume | compacted: new snapshot) -> events ...

It resumes at the last event's mod_revision + 1 (or the last progress notification's revision + 1), so no event is
lost or seen twice. An etcd that notifies of progress every second (the embedded one does) is missed after three seconds. By default
etcd does so every ten minutes: then the transport tells a quiet stream from a dead one.
Before it resumes it checks etcd's revision: an etcd restored from an older backup would send nothing for a long time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from trireme_shared.platform.etcd.backoff import pauses
from trireme_shared.platform.etcd.errors import Compacted, Retryable, WentBack
from trireme_shared.platform.etcd.results import RangeResult, WatchBatch, WatchEvent
from trireme_shared.platform.etcd.transport import WATCH, Body, Transport
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import TriremeError

PROGRESS_INTERVAL_S = 1.0  # of an etcd with --experimental-watch-progress-notify-interval 1s
IDLE_LIMIT_S = 3 * PROGRESS_INTERVAL_S  # once notifications came so often
CREATED_LIMIT_S = 10.0  # etcd answers a new watch at once, whatever it will send later

log = telemetry.logger("etcd.watch")


async def watch(
    transport: Transport,
    read: Callable[[], Awaitable[RangeResult]],
    current: Callable[[], Awaitable[int]],
    interval: tuple[bytes, bytes],
    start_revision: int,
) -> AsyncGenerator[WatchBatch, None]:
    """Batches of events of `interval` from `start_revision` on (0: a snapshot first, as a reset batch).

    `read` gives a snapshot of the interval, `current` etcd's revision. Errors are logged and the watch goes on; it ends only
    by closing, cancelling or WentBack.
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
                        [WatchEvent.of(e) for e in message.get("events", ()) if e["kv"].get("mod_revision", 0) >= due]
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
            log.warning("watch_compacted", key=health.key, due=due, cause=str(error))
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
            log.info("watch_resumed", key=self.key, due=due)

    def bad(self, due: int, cause: str) -> None:
        report = log.debug if self._broken else log.warning
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
