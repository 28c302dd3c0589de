"""The process that comes after a dead one tells the master at which records it died."""

from __future__ import annotations

import os

import pytest

from trainer_agent.data import minibatch_indices
from trainer_agent.process import journal_file, report_last_end
from trireme_shared.platform.runtime import begun
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records import FailTask, JobSpec
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.tasks import READING, BegunWork

SPEC = JobSpec(
    job="j",
    script="s.py",
    dataset=TextLines("train.txt"),
    storage="/s",
    global_batch_size=4,
    lanes=1,
    records_per_task=16,
    seed=5,
)


class Master:
    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[tuple[str, FailTask]] = []
        self._error = error

    async def fail_task(self, task_id: str, failed: FailTask) -> None:
        self.told.append((task_id, failed))
        if self._error is not None:
            raise self._error


def left(*works: BegunWork, hung: bool = False) -> begun.Left:
    return begun.Left("trainer-0-ab12", tuple(work.to_bytes() for work in works), hung)


@pytest.mark.parametrize(
    ("end", "hung", "how"),
    [
        ("SIGKILL", False, "was killed by SIGKILL (out of memory?)"),
        ("out of memory (limit 4 GiB)", False, "ran out of memory (limit 4 GiB)"),
        ("SIGSEGV", False, "crashed with SIGSEGV"),
        ("exit code 3", False, "ended with exit code 3"),
        ("", False, "ended"),
        ("exit code 70", True, "hung for 1200 s (task_timeout_ceiling_s)"),
    ],
)
async def test_each_thing_that_was_begun_is_reported_with_the_end_and_the_records(
    monkeypatch, end, hung, how
):
    monkeypatch.setenv(begun.LAST_END, end)
    master = Master()
    works = BegunWork("2", 1, 3, "train.txt", 32, 16), BegunWork("3", 1, READING, "train.txt", 48, 16)
    await report_last_end(left(*works, hung=hung), SPEC, master)
    (first, computed), (second, read) = master.told
    numbers = sorted(32 + int(n) for n in minibatch_indices(5, 1, 2, 16, 4, 3, shuffle=True))
    assert (first, computed.trainer, computed.epoch, computed.died_at) == ("2", "trainer-0-ab12", 1, 3)
    assert computed.failure.message.startswith(f"trainer-0 {how} while it computed records {numbers[0]}")
    assert computed.failure.message.endswith(f"{numbers[-1]} of train.txt (task 2, minibatch 3)")
    assert (second, read.died_at) == ("3", READING)
    assert read.failure.message == f"trainer-0 {how} while it read records 48-63 of train.txt (task 3)"


async def test_a_task_that_the_job_does_not_have_any_more_is_no_obstacle():
    master = Master(NotFound("no such task"))
    works = BegunWork("900", 0, 70, "train.txt", 0, 16), BegunWork("1", 0, 0, "train.txt", 16, 16)
    await report_last_end(left(*works), SPEC, master)
    assert [task for task, _ in master.told] == ["900", "1"]


def test_without_a_launcher_the_journal_is_a_file_of_this_user_in_the_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(begun.FILE, "/somewhere/else")
    assert str(journal_file("j", "trainer")) == "/somewhere/else"
    monkeypatch.delenv(begun.FILE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert journal_file("j", "trainer") == tmp_path / f"trireme-begun-{os.getuid()}-j-trainer"
