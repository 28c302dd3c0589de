"""Events as etcd holds them: read by whoever takes over, or wants to see those of a job that nobody leads."""

from __future__ import annotations

from master_service.core.changes import PutEvents
from master_service.core.state.event_log import EventLog
from shared.etcd import Etcd
from shared.etcd.reading import read_below, read_record
from shared.events import EventChunk


async def read_events(etcd: Etcd, prefix: str) -> EventLog:
    """`prefix`: of the chunks. Raises PeerError."""
    found, _ = await read_below(etcd, prefix)
    kept = EventLog()
    for key in sorted(found):
        if (change := chunk_of(key, found[key].value)) is not None:
            kept.apply(change)
    return kept


def chunk_of(key: str, value: bytes) -> PutEvents | None:
    """None: it holds no events (this is logged)."""
    told = read_record(EventChunk, key, value)
    return PutEvents(told.events[0].event_id, told.events[-1].event_id, value) if told and told.events else None
