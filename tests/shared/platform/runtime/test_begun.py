"""What a process is at outlives it, however it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap

import pytest

from trireme_shared.platform.runtime import begun
from trireme_shared.platform.runtime.begun import HUNG, SLOTS, Journal, left_by, pardon
from trireme_shared.protocol.records.tasks import FILE_CHARACTERS, READING, BegunWork


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "journal")
    made.begin("trainer-0-ab12")
    yield made
    made.close()


def test_what_is_begun_is_on_record_until_it_is_done(journal):
    assert left_by(journal.path) is None
    with journal.at(b"one"):
        with journal.at(b"another"):
            left = left_by(journal.path)
            assert (left.process, set(left.works), left.hung) == (
                "trainer-0-ab12",
                {b"one", b"another"},
                False,
            )
        assert left_by(journal.path).works == (b"one",)
    assert left_by(journal.path) is None


def test_who_waits_for_others_in_the_middle_of_a_work_is_not_at_it(journal):
    with journal.at(b"one"):
        with journal.waiting():
            assert left_by(journal.path) is None
        assert left_by(journal.path).works == (b"one",)
    with journal.waiting():
        assert left_by(journal.path) is None


def test_a_process_that_is_told_to_stop_or_was_ended_from_outside_leaves_no_blame(journal):
    with journal.at(b"one"):
        pardon(journal.path)
        assert left_by(journal.path) is None
        journal.begin("trainer-0-cd34")
        with journal.at(b"two"):
            assert left_by(journal.path).works == (b"two",)
            journal.pardon()
            assert left_by(journal.path) is None


def test_more_works_than_slots_are_done_all_the_same(journal):
    with contextlib.ExitStack() as stack:
        for number in range(SLOTS + 3):
            stack.enter_context(journal.at(str(number).encode()))
        assert len(left_by(journal.path).works) == SLOTS
    assert left_by(journal.path) is None


def test_an_orderly_end_leaves_no_file_and_files_of_others_mean_nothing(tmp_path):
    made = Journal(tmp_path / "journal")
    made.begin("t")
    made.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other").write_text("something else")
    assert left_by(tmp_path / "other") is None
    again = Journal(tmp_path / "other")
    assert again.left is None
    again.close()


def test_a_link_that_somebody_else_has_put_there_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "journal").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(tmp_path / "journal")
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_a_journal_nothing_is_kept():
    with begun.at(b"one"), begun.waiting():
        pass


@pytest.mark.parametrize(
    "name", ["train.csv", "s3://bucket/" + "ä" * 400 + "/train.csv", 'a"b\\c', "100%/%d.csv"]
)
def test_a_work_is_read_as_it_was_written(name):
    work = BegunWork("17", 3, READING, name, 512, 64)
    text = work.to_bytes()
    assert len(text) < begun.WORK_BYTES
    found = BegunWork.from_bytes(text.ljust(begun.WORK_BYTES, b"\0").rstrip(b"\0"))
    assert (found.task, found.epoch, found.minibatch, found.first, found.count) == ("17", 3, -1, 512, 64)
    assert found.file.removeprefix("…") == name[-FILE_CHARACTERS:]
    assert BegunWork.from_bytes(b"[1]") is None


PROGRAM = """
import os, re, signal, sys, time
from pathlib import Path
from trireme_shared.platform.runtime import begun
if __name__ == "__main__":
    journal = begun.open_journal(Path(sys.argv[1]))
    print(journal.left, flush=True)
    journal.begin("trainer-0-1")
    journal.watch(0.4)
    with begun.at(b"the work"):
        {what}
"""


@pytest.mark.parametrize(
    ("what", "code", "hung"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, False),
        ("os._exit(3)", 3, False),
        ("os.abort()", -6, False),
        ("time.sleep(60)", HUNG, True),
        ("re.match('(a+)+$', 'a' * 64 + 'b')", 1, False),
    ],
)
def test_the_next_process_learns_at_what_the_one_before_it_ended(tmp_path, what, code, hung):
    file = tmp_path / "journal"
    program = textwrap.dedent(PROGRAM).format(what=what)
    run = [sys.executable, "-c", program, str(file)]
    assert subprocess.run(run, check=False, timeout=30, capture_output=True).returncode == code
    left = left_by(file)
    assert (left.process, left.works, left.hung) == ("trainer-0-1", (b"the work",), hung)
    later = Journal(file)
    assert later.left == left
    later.begin("trainer-0-2")
    assert left_by(file) is None
    later.close()
