"""Events: what happened to a job or a cluster, for people and programs. They cross REST and are kept in etcd."""

from __future__ import annotations

from shared.records.record import Record, shortened

MESSAGE = 1000  # characters
FIELD = 300  # characters
MOST_BYTES = 3 << 10  # of one event

EventFields = dict[str, str | int | float | bool]


class EventRecord(Record):
    """`event_id` grows by one from event to event, also from one master to the next. `name` is stable, `message` a sentence."""

    event_id: int
    event_time: str
    name: str
    message: str
    fields: EventFields


class EventChunk(Record):
    """`events/<id of the first>`: what one transaction tells."""

    events: tuple[EventRecord, ...]


def event_record(event_id: int, time: str, name: str, message: str, fields: EventFields) -> EventRecord:
    """Long texts are shortened, so that it takes at most MOST_BYTES; what is left out stands in the log of the process."""
    short: EventFields = {
        key: shortened(value, FIELD) if isinstance(value, str) else value for key, value in fields.items()
    }
    made = EventRecord(event_id=event_id, event_time=time, name=name, message=shortened(message, MESSAGE), fields=short)
    if len(made.to_bytes()) > MOST_BYTES:  # characters of several bytes, or very many fields
        made = made.with_fields(message=shortened(made.message, MESSAGE // 4), fields={})
    return made
