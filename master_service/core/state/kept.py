"""What a job and a cluster keep for those who ask later, as etcd holds it, bounded in number and in bytes:
their newest events, and the answers to requests that came with an Idempotency-Key."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from master_service.core.changes import DropAnswer, DropEvents, Event, PutEvents
from trireme_shared.protocol.errors import CursorExpired
from trireme_shared.protocol.events import EventChunk, EventRecord, event_record
from trireme_shared.protocol.records.operations import KeptAnswer
from trireme_shared.protocol.times import rfc3339

KEPT_EVENTS = 1000
KEPT_BYTES = 256 << 10
IDS_PER_REVISION = 1_000_000


@dataclass
class EventLog:
    """Events with ids that grow by one.

    told(events) ─► PutEvents: the next ids; DropEvents: the oldest, once there are too many
                    nothing has happened yet
    apply(change)   now it has

    `next_id`: of the next event; 0 before `begin`. A chunk is what one transaction told, as etcd holds it:
    parsed events take several times as much memory, and hardly anybody asks for the old ones.
    """

    next_id: int = 0
    _chunks: deque[PutEvents] = field(default_factory=deque)
    _bytes: int = 0

    def __repr__(self) -> str:
        return f"<EventLog {self.oldest} to {self.newest}, {self._bytes} bytes>"

    def begin(self, revision: int) -> None:
        """In place: a log without events begins with ids that no earlier log of the same keys has used.
        `revision`: of etcd, now."""
        if not self.next_id:
            self.next_id = revision * IDS_PER_REVISION + 1

    def copy(self) -> EventLog:
        """It changes apart from this one."""
        return replace(self, _chunks=self._chunks.copy())

    @property
    def oldest(self) -> int:
        """The id of the oldest event that is kept; of the next one if none is."""
        return self._chunks[0].first if self._chunks else self.next_id

    @property
    def newest(self) -> int:
        """The id of the newest event; if there is none, the id before the first one."""
        return max(0, self.next_id - 1)

    def told(self, events: Sequence[tuple[str, Event]]) -> tuple[PutEvents, *tuple[DropEvents, ...]]:
        """What to write for these events, each with its time; there is one at least."""
        made = tuple(
            event_record(self.next_id + number, time, event.name, event.message, event.fields)
            for number, (time, event) in enumerate(events)
        )
        put = PutEvents(made[0].event_id, made[-1].event_id, EventChunk(events=made).to_bytes())
        size, before = self._bytes + len(put.value), self.oldest
        for chunk, following in pairwise((*self._chunks, put)):
            if put.last - chunk.first < KEPT_EVENTS and size <= KEPT_BYTES:
                break
            size, before = size - len(chunk.value), following.first
        return (put,) if before == self.oldest else (put, DropEvents(before))

    def apply(self, change: PutEvents | DropEvents) -> None:
        """In place."""
        if isinstance(change, PutEvents):
            self._chunks.append(change)
            self._bytes += len(change.value)
            self.next_id = change.last + 1
            return
        while self._chunks and self._chunks[0].first < change.before:
            self._bytes -= len(self._chunks.popleft().value)

    def after(self, event_id: int, limit: int) -> list[EventRecord]:
        """Events with a larger id, the oldest first, at most `limit`."""
        found: list[EventRecord] = []
        for chunk in self._chunks:
            if chunk.last > event_id and len(found) < limit:
                told = EventChunk.model_validate_json(chunk.value).events
                found += [event for event in told if event.event_id > event_id]
        return found[:limit]

    def check(self, cursor: int) -> None:
        """Raises CursorExpired if not all events after it are kept, or if it is none of this log. 0 is the
        beginning of what is kept."""
        if cursor and not self.oldest - 1 <= cursor <= self.newest:
            msg = (
                f"the events right after {cursor} are not kept: the oldest is {self.oldest}, the "
                f"newest {self.newest}"
            )
            hint = "what is kept begins after=0; what happened before stands in the masters' logs"
            raise CursorExpired(msg, hint=hint, after=cursor, oldest=self.oldest, newest=self.newest)


KEPT_ANSWERS = 1000
KEPT_ANSWERS_S = 24 * 3600.0
AT_ONCE = 20  # are forgotten when a new one comes


class KeptAnswers:
    """Answers by a digest of their key, for KEPT_ANSWERS_S. Only `apply` changes it."""

    def __init__(self) -> None:
        self._records: dict[str, KeptAnswer] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptAnswers) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, change: KeptAnswer | DropAnswer) -> None:
        """In place."""
        match change:
            case KeptAnswer():
                self._records[change.key] = change
            case DropAnswer(key):
                self._records.pop(key, None)

    def find(self, key: str, wall_time: float) -> KeptAnswer | None:
        """`wall_time`: seconds since 1970. None: the key is new, or was used too long ago."""
        found = self._records.get(key)
        return None if found is None or found.create_time < _oldest(wall_time) else found

    def surplus(self, wall_time: float) -> tuple[DropAnswer, ...]:
        """What a new one takes the place of, the oldest first: at most AT_ONCE, more with the next ones."""
        many, oldest = len(self._records) + 1 - KEPT_ANSWERS, _oldest(wall_time)
        first = heapq.nsmallest(AT_ONCE, ((kept.create_time, key) for key, kept in self._records.items()))
        return tuple(
            DropAnswer(key) for number, (time, key) in enumerate(first) if number < many or time < oldest
        )


def _oldest(wall_time: float) -> str:
    """The first time that counts: such times, all in UTC, are in the order of their texts."""
    return rfc3339(wall_time - KEPT_ANSWERS_S)
