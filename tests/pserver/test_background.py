"""What is written behind training runs at a lower priority than what is waited for."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from pserver_service import disk
from pserver_service.background import NICENESS, Background


def niceness(*_: object) -> list[int]:
    """Of this thread, and of one that it starts."""
    found = []

    def note():
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    note()
    child = threading.Thread(target=note)
    child.start()
    child.join()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_only_parts_are_written_at_a_lower_priority(monkeypatch):
    background, before = Background(), niceness()
    try:
        assert await background(niceness) == before
        monkeypatch.setattr(disk, "write_part", niceness)
        assert await background(disk.write_part, "url", {}, None) == [NICENESS, NICENESS]
        assert niceness() == before
    finally:
        background.close()
