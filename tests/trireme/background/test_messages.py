"""What the process of a run tells its parent, whether the parent reads it or not."""

from __future__ import annotations

import json
import os

import pytest

from trireme.background.errors import InvalidSetting, JobFailed, JobStopped
from trireme.background.process import MOST_WAITING, Lines, Messages
from trireme.background.supervised import End, end_of, end_of_dead
from trireme.launch.processes import ClusterError
from trireme.settings import UsageError
from trireme_shared.protocol.errors import (
    CheckpointUnusable,
    Conflict,
    PeerError,
    TriremeError,
    UserCodeError,
)

FAILURE = {
    "error_type": "ValueError",
    "message": "no",
    "traceback": "File script.py\nValueError: no",
    "task": "task 3",
}


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "wb") as write:
        yield read, write


def test_a_parent_that_does_not_read_stops_nothing_and_still_gets_the_end(pipe):
    read, write = pipe
    messages = Messages(write)
    for number in range(2 * MOST_WAITING):  # far more than a pipe holds
        messages.send("event", f"{number} {'x' * 100}")
    messages.send("ended", {"stopped": True})
    lines = [json.loads(read.readline())]
    while "ended" not in lines[-1]:
        lines.append(json.loads(read.readline()))
    messages.close()
    assert lines[0] == {"event": f"0 {'x' * 100}"}
    assert MOST_WAITING < len(lines) < 2 * MOST_WAITING


def test_of_the_progress_that_waits_only_the_last_is_told(pipe):
    read, write = pipe
    messages = Messages(write)
    for number in range(10_000):
        messages.send("progress", {"step": number})
    messages.close()
    write.close()
    told = [json.loads(line)["progress"]["step"] for line in read]
    assert told[-1] == 9999
    assert told == sorted(told)
    assert len(told) < 10_000


def test_a_parent_that_is_gone_is_no_error(pipe):
    read, write = pipe
    read.close()
    messages = Messages(write)
    messages.send("event", "nobody reads this")
    messages.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), write.fileno())  # what is buffered has a place to go


def test_text_is_told_line_by_line():
    told: list[str] = []
    stream = Lines(told.append)
    print("one\ntw", end="", file=stream)
    print("o\n\nthree", file=stream)
    assert told == ["one", "two", "three"]


# ---------------------------------------------------------------- ends


def error_of(told: dict) -> TriremeError:
    end = end_of(told, "job digits", "trireme.run('digits.py')")
    assert end.phase == "STOPPED"
    assert end.error is not None
    return end.error


def test_a_run_that_was_stopped_says_how_it_goes_on():
    error = error_of({"stopped": True})
    assert isinstance(error, JobStopped)
    assert (str(error), error.hint) == (
        "job digits was stopped before its end",
        "resume it: trireme.run('digits.py')",
    )


def test_errors_of_the_command_are_raised_with_their_classes_and_in_pythons_words():
    told = Conflict("job a has epochs = 2", hint="use another name (--job NAME)").to_map()
    error = error_of({"error": told})
    assert (type(error), error.hint) == (Conflict, "use another name (job=NAME)")
    assert isinstance(error_of({"error": UsageError("epochs = 0").to_map()}), InvalidSetting)
    assert type(error_of({"error": CheckpointUnusable("damaged").to_map()})) is CheckpointUnusable


def test_the_log_of_a_child_that_ends_again_and_again_is_shown():
    error = error_of({"error": ClusterError("trainer-0 ended 5 times", log="t.log", tail="Killed").to_map()})
    assert type(error) is ClusterError
    assert error.__notes__ == ["the end of t.log:\nKilled"]


def test_an_error_of_the_script_has_its_traceback():
    error = error_of({"failure": FAILURE})
    assert isinstance(error, UserCodeError)
    assert str(error) == "job digits failed:\nFile script.py\nValueError: no\nin task 3"


@pytest.mark.parametrize(("resumable", "again"), [(True, "goes on"), (False, "starts from the beginning")])
def test_a_job_that_failed_says_why_and_what_the_same_call_would_do(resumable, again):
    result = {
        "job": "digits",
        "phase": "FAILED",
        "reason": "the script raised",
        "failure": FAILURE,
        "logs": "/logs",
    }
    end = end_of({"code": 1, "result": {**result, "resumable": resumable}}, "job digits", "again")
    assert end.phase == "FAILED"
    assert isinstance(end.error, JobFailed)
    assert str(end.error) == "job digits failed: the script raised\nFile script.py\nValueError: no\nin task 3"
    assert end.error.hint.startswith(f"the same call {again}")
    assert end.error.details["result"] == end.result


def test_a_completed_job_is_no_error():
    result = {"job": "digits", "phase": "COMPLETED"}
    assert end_of({"code": 0, "result": result}, "job digits", "again") == End(result)


def test_a_process_that_was_killed_is_told_with_what_it_last_said():
    end = end_of_dead(-9, "out of memory", "job digits", "trireme.run('digits.py')")
    assert end.phase == "STOPPED"
    assert isinstance(end.error, PeerError)
    assert str(end.error) == "the process that runs job digits has ended (SIGKILL)\nout of memory"
    assert end.error.hint == "resume it: trireme.run('digits.py')"
