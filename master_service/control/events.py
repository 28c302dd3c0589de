"""The events of what a process leads: logged here, kept in the log that etcd has, and waited for by those who
follow them.

a decision's events ── in the transaction of its changes ──┐
add(events) ── with the next transaction ──────────────────┴─► EventLog, in etcd
    ─► announce: whoever waits looks again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.core.changes import Event
from master_service.core.state.kept import EventLog
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.events import EventRecord

log = telemetry.logger("events")


class EventFeed:
    """Between terms nothing is written: then `add` only logs."""

    def __init__(self) -> None:
        self._log: Callable[[], EventLog] = EventLog
        self._tell: Callable[[Sequence[Event]], None] | None = None
        self._arrived = asyncio.Event()

    def begin(self, kept: Callable[[], EventLog], tell: Callable[[Sequence[Event]], None]) -> None:
        """A term begins. `kept`: its log, now; `tell` writes events that no decision tells."""
        self._log, self._tell = kept, tell

    def end(self) -> None:
        """The term is over: nothing is written any more, and those who wait learn it."""
        kept = self._log()
        self._log, self._tell = lambda: kept, None
        self.wake()

    def add(self, events: Sequence[Event]) -> None:
        """Log what no decision tells, and have it written."""
        if not events:
            return
        self.announce(events)
        if self._tell is not None:
            self._tell(events)

    def announce(self, events: Sequence[Event]) -> None:
        """Log these. Whoever waits for news looks again: there are these, or others that were logged before
        are in etcd now."""
        for event in events:
            fields = {
                f"of_{name}" if name in ("event", "level") else name: v for name, v in event.fields.items()
            }
            log.info(event.name, message=event.message, **fields)
        self.wake()

    def after(self, event_id: int, limit: int) -> list[EventRecord]:
        """Events with a larger id that are kept, the oldest first; the newest of them may not be in etcd
        yet."""
        return self._log().after(event_id, limit)

    async def next(self, limit_s: float) -> None:
        """Wait for something new, at most `limit_s`."""
        await event_within(self._arrived, limit_s)

    async def beyond(self, cursor: int, limit_s: float) -> None:
        """Wait until there is an event after the cursor, or the term ends, at most `limit_s`."""
        deadline = clock.monotonic() + limit_s
        while (
            self._tell is not None
            and self._log().newest <= cursor
            and (left_s := deadline - clock.monotonic()) > 0
        ):
            await self.next(left_s)

    def wake(self) -> None:
        """Whoever waits for news looks again, also without an event."""
        self._arrived.set()
        self._arrived = asyncio.Event()
