"""Nothing of what happened to the children is missing in their file after a full disk, and no torn line makes
it unreadable."""

from __future__ import annotations

import pytest

from tests.equipment.small_disk import fill, small_disk
from trireme.view.child_events import EVENTS_FILE, ChildEvent, EventFile, read_events

__all__ = ["small_disk"]


def event(pid: int) -> ChildEvent:
    return ChildEvent("trainer-0", "restarted", "SIGKILL " + "x" * 900, pid)


def test_events_that_a_full_disk_did_not_take_are_written_in_order_once_there_is_room(small_disk):
    events = EventFile(small_disk)
    events.append(event(0))
    filler = fill(small_disk)
    # the last page has room for some lines and a part of one
    with pytest.raises(OSError, match="No space left"):
        for pid in range(1, 10):
            events.append(event(pid))
    with pytest.raises(OSError, match="No space left"):
        events.write_waiting()
    written = [each["pid"] for each in read_events(small_disk)]
    assert written == list(range(len(written)))
    filler.unlink()
    events.write_waiting()
    events.append(event(100))
    assert [each["pid"] for each in read_events(small_disk)] == [*range(len(written) + 1), 100]


def test_a_line_that_a_killed_launcher_left_unfinished_is_no_event_and_harms_no_other(tmp_path):
    EventFile(tmp_path).append(event(1))
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": "2026-11-23T10:')
    EventFile(tmp_path).append(event(2))
    assert [each["pid"] for each in read_events(tmp_path)] == [1, 2]
