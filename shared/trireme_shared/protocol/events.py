"""Events: what happened to a job or a cluster, for people and programs. They cross REST and are kept in
etcd."""

from __future__ import annotations

from pydantic import Field

from trireme_shared.protocol.records.record import Record, shortened

MESSAGE = 1000  # characters
FIELD = 300  # characters
MOST_BYTES = 3 << 10  # of one event

EventFields = dict[str, str | int | float | bool]


class EventRecord(Record):
    """One event of a job or a cluster."""

    event_id: int = Field(
        description="Number of the event; it grows by one from event to event, also from one master to the "
        "next."
    )
    event_time: str = Field(description="When it happened, RFC 3339.")
    name: str = Field(description="Stable name of what happened.")
    message: str = Field(description="What happened, as a sentence.")
    fields: EventFields = Field(description="Values of the event, by name.")


class EventChunk(Record):
    """`events/<id of the first>`: what one transaction tells."""

    events: tuple[EventRecord, ...]


def event_record(event_id: int, time: str, name: str, message: str, fields: EventFields) -> EventRecord:
    """Long texts are shortened, so that it takes at most MOST_BYTES; what is left out stands in the log of
    the process."""
    short: EventFields = {
        key: shortened(value, FIELD) if isinstance(value, str) else value for key, value in fields.items()
    }
    made = EventRecord(
        event_id=event_id, event_time=time, name=name, message=shortened(message, MESSAGE), fields=short
    )
    if len(made.to_bytes()) > MOST_BYTES:  # characters of several bytes, or very many fields
        made = made.with_fields(message=shortened(made.message, MESSAGE // 4), fields={})
    return made
