"""The log of events: ids grow by one, and it is bounded in number and in bytes, whatever is told."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.changes import DropEvents, Event, PutEvents
from master_service.core.state import kept as event_log
from master_service.core.state.kept import EventLog
from tests.equipment.replaced import replaced
from trireme_shared.protocol.errors import CursorExpired
from trireme_shared.protocol.events import MOST_BYTES, EventChunk, event_record

TIME = "2026-01-01T00:00:00.000+00:00"


def tell(kept: EventLog, messages: list[str]) -> None:
    for change in kept.told([(TIME, Event("told", message)) for message in messages]):
        kept.apply(change)


def begun() -> EventLog:
    kept = EventLog()
    kept.begin(7)
    return kept


@given(st.lists(st.lists(st.text(max_size=400), min_size=1, max_size=5), max_size=40))
def test_ids_grow_by_one_and_the_newest_events_that_fit_are_kept(told: list[list[str]]) -> None:
    kept, stored = begun(), dict[int, bytes]()
    with replaced(event_log, "KEPT_EVENTS", 20), replaced(event_log, "KEPT_BYTES", 4000):
        for messages in told:
            for change in kept.told([(TIME, Event("told", message)) for message in messages]):
                kept.apply(change)
                if isinstance(change, PutEvents):
                    stored[change.first] = change.value
                else:
                    stored = {first: value for first, value in stored.items() if first >= change.before}
    found = kept.after(0, 1000)
    assert [event.event_id for event in found] == list(range(kept.oldest, kept.newest + 1))
    assert kept.newest == 7_000_000 + sum(map(len, told))
    assert [
        event for value in stored.values() for event in EventChunk.model_validate_json(value).events
    ] == found
    if told:
        assert len(found) <= max(20, len(told[-1]))
        assert sum(map(len, stored.values())) <= max(4000, len(next(reversed(stored.values()))))
        assert [event.message for event in found][-len(told[-1]) :] == told[-1]


def test_a_log_that_has_no_events_begins_above_all_ids_of_an_earlier_one() -> None:
    kept = begun()
    kept.begin(9)
    assert (kept.next_id, kept.oldest, kept.newest) == (7_000_001, 7_000_001, 7_000_000)


def test_a_cursor_is_good_while_all_that_follows_it_is_kept() -> None:
    kept = begun()
    for number in range(5):
        tell(kept, [f"first of {number}", f"second of {number}"])
    kept.apply(DropEvents(7_000_005))
    assert [event.message for event in kept.after(7_000_005, 2)] == ["second of 2", "first of 3"]
    for cursor in (0, 7_000_004, 7_000_010):
        kept.check(cursor)
    for cursor in (1, 7_000_003, 7_000_011):
        with pytest.raises(CursorExpired) as raised:
            kept.check(cursor)
        assert raised.value.details == {"after": cursor, "oldest": 7_000_005, "newest": 7_000_010}


def test_a_copy_changes_apart() -> None:
    kept = begun()
    tell(kept, ["one"])
    other = kept.copy()
    tell(other, ["two"])
    assert [len(each.after(0, 10)) for each in (kept, other)] == [1, 2]


@pytest.mark.parametrize("character", ["x", "\U0001f600", '"'])
def test_an_event_is_bounded_in_bytes(character: str) -> None:
    fields = {f"field-{number}": character * 1000 for number in range(10)}
    made = event_record(2**60, TIME, "told", character * 5000, {**fields, "count": 3})
    assert len(made.to_bytes()) <= MOST_BYTES
    assert made.message.startswith(character * 50)


def test_what_is_kept_takes_little_memory() -> None:
    """1.7 KB for each event, as parsed ones take, would be 290 MB for a leader of 170 jobs."""
    tracemalloc.start()
    try:
        kept = begun()
        for number in range(event_log.KEPT_EVENTS):
            tell(kept, [f"task {number} (train-00001.parquet records 1000-1999) goes back: ValueError: no"])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.after(0, 10_000)) == event_log.KEPT_EVENTS
    assert held < event_log.KEPT_EVENTS * 600
