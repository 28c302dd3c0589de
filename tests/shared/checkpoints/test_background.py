"""What is written behind training runs at a lower priority than what is waited for, rests, and ends with the
process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from trireme_shared.checkpoints import writer
from trireme_shared.checkpoints import writer as module
from trireme_shared.checkpoints.writer import NICENESS, REST, Abandoned, Background, Pace
from trireme_shared.platform.storage import files, tensor_file


def niceness(*_: object, **__: object) -> list[int]:
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
        monkeypatch.setattr(writer, "write_part", niceness)
        assert await background(writer.write_part, "url", {}, None) == [NICENESS, NICENESS]
        monkeypatch.setattr(writer, "narrow_to_changes", niceness)
        assert await background(writer.narrow_to_changes, None, None) == [NICENESS, NICENESS]
        assert niceness() == before
    finally:
        background.close()


@pytest.fixture
def spans(monkeypatch):
    """How long a writer rests; each call of its clock finds 10 ms more of work."""
    worked, rested = iter(range(1000)), []
    monkeypatch.setattr(module.clock, "thread_seconds", lambda: next(worked) * 0.01)

    def pace(hurried=lambda: False):
        made = Pace(hurried)
        monkeypatch.setattr(made.ended, "wait", lambda seconds: rested.append(seconds) or made.ended.is_set())
        made.begin()
        return made

    pace.rested = rested
    return pace


def test_a_writer_rests_in_proportion_to_its_work_and_not_if_somebody_waits(spans):
    hurry = []
    pace = spans(lambda: bool(hurry))
    pace.rest()
    hurry.append(True)
    pace.rest()
    assert spans.rested == [pytest.approx(0.01 * REST), 0.0]


def test_short_work_is_not_interrupted(monkeypatch):
    monkeypatch.setattr(module.clock, "thread_seconds", lambda: 1.0)
    pace = Pace(lambda: False)
    pace.begin()
    monkeypatch.setattr(pace.ended, "wait", None)
    pace.rest()


async def test_a_part_that_is_being_written_when_the_process_leaves_is_not_there(tmp_path, monkeypatch):
    """It would be nobody's: its index is another's by then."""
    background, begun, go_on = Background(), threading.Event(), threading.Event()

    def write_part(url, rest):
        with files.write_atomic(url) as file:
            file.write(b"half")
            begun.set()
            go_on.wait(10)
            rest()

    monkeypatch.setattr(writer, "write_part", write_part)
    writing = asyncio.ensure_future(background(writer.write_part, str(tmp_path / "part")))
    assert await asyncio.to_thread(begun.wait, 10)
    background.close()
    go_on.set()
    with pytest.raises(Abandoned):
        await writing
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_with_a_rest_after_each_chunk(tmp_path):
    rests = []
    tensor = memoryview(bytearray(3 * tensor_file.CHUNK_BYTES))
    entry = tensor_file.Entry("a", "float32", (tensor.nbytes // 4,))
    tensor_file.write(str(tmp_path / "f"), {}, [(entry, tensor)], lambda: rests.append(None))
    assert len(rests) == 4  # the header's too
