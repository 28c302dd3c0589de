"""The last state changes of this process, for people and programs: a bounded list with ids that only grow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from master_service.core.changes import Event
from shared.records import Record
from shared.runtime import clock, telemetry
from shared.runtime.waiting import event_within

KEPT = 2000
IDS_PER_TERM = 1_000_000

log = telemetry.logger("events")


class EventRecord(Record):
    """`event_id` grows, also from one master to the next (term x 1,000,000 + count)."""

    event_id: int
    event_time: str
    name: str
    message: str
    fields: dict[str, str | int | float | bool]


class EventRing:
    def __init__(self) -> None:
        self._kept: deque[EventRecord] = deque(maxlen=KEPT)
        self._next_id = 1
        self._arrived = asyncio.Event()

    def begin_term(self, term: int) -> None:
        self._next_id = max(self._next_id, term * IDS_PER_TERM)

    def add(self, events: Sequence[Event]) -> None:
        """Keep them, and log each one."""
        for event in events:
            fields = {f"of_{name}" if name in ("event", "level") else name: v for name, v in event.fields.items()}
            log.info(event.name, message=event.message, **fields)
            self._kept.append(
                EventRecord(
                    event_id=self._next_id,
                    event_time=clock.timestamp(),
                    name=event.name,
                    message=event.message,
                    fields=event.fields,
                )
            )
            self._next_id += 1
        if events:
            self._arrived.set()
            self._arrived = asyncio.Event()

    def after(self, event_id: int, limit: int) -> list[EventRecord]:
        """Events with a larger id that are still kept, the oldest first."""
        found = [event for event in self._kept if event.event_id > event_id]
        return found[:limit]

    async def next(self, limit_s: float) -> None:
        """Wait for something new, at most `limit_s`."""
        await event_within(self._arrived, limit_s)

    async def wait(self, event_id: int, limit: int, wait_s: float) -> list[EventRecord]:
        """As `after`; if there are none, wait for one at most `wait_s`."""
        if not (found := self.after(event_id, limit)) and wait_s > 0:
            await self.next(wait_s)
            found = self.after(event_id, limit)
        return found
