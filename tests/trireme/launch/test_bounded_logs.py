"""Logs of hosts do not fill the disk: one is cut, those of deleted jobs go, and the oldest of too many."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.equipment.waiting import until
from trireme.launch import bounded_logs
from trireme.launch.bounded_logs import HostLogs, cut_long, keep_bounded
from trireme_shared.platform.runtime.log_files import LogFile
from trireme_shared.protocol.errors import PeerError


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    for name, seconds in (("LOOK_S", 0.01), ("SWEEP_S", 0.02), ("GONE_S", 0.1)):
        monkeypatch.setattr(bounded_logs, name, seconds)


def write(path: Path, content: str, *, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


class Cluster:
    """The jobs that etcd has, or that it does not answer; and the logs that are written now."""

    def __init__(self, *jobs: str) -> None:
        self.jobs, self.away, self.asked = set(jobs), False, 0
        self.written: list[Path] = []

    async def exists(self, job: str) -> bool:
        self.asked += 1
        if self.away:
            raise PeerError("etcd is away")
        return job in self.jobs


@asynccontextmanager
async def bounded(logs: Path, cluster: Cluster, **limits: int) -> AsyncIterator[None]:
    made = HostLogs(logs, cluster.exists, lambda: cluster.written, **limits)
    running = asyncio.ensure_future(made.run())
    yield
    assert not running.done(), "nothing ends it"
    running.cancel()


def test_a_long_log_begins_again_while_it_is_written_and_its_reader_goes_on(tmp_path):
    path = write(tmp_path / "trainer-0.log", "")
    with path.open("ab", 0) as writer:
        writer.write(b"old\n" * 30)
        reader = LogFile(path)
        assert len(reader.last(100)) == 30
        cut_long(tmp_path, 100)
        assert (path.read_bytes(), (tmp_path / "trainer-0.log.1").read_bytes()) == (b"", b"old\n" * 30)
        writer.write(b"new\n")
        assert path.read_bytes() == b"new\n", "no hole before it"
        assert [line.text for line in reader.news()] == ["new"]
        writer.write(b"mid\n" * 30)
        cut_long(tmp_path, 100)
    assert (tmp_path / "trainer-0.log.1").read_bytes() == b"new\n" + b"mid\n" * 30
    assert (tmp_path / "trainer-0.log.1").stat().st_mode & 0o077 == 0


def test_what_is_no_log_is_left_alone(tmp_path):
    other = write(tmp_path / "elsewhere" / "file", "x" * 200)
    write(tmp_path / "logs" / "trainer-0.begun", "x" * 200)
    (tmp_path / "logs" / "trainer-0.log").symlink_to(other)
    cut_long(tmp_path / "logs", 100)
    cut_long(tmp_path / "none", 100)
    assert other.stat().st_size == 200
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "trainer-0.begun",
        "trainer-0.log",
    ]


async def test_the_logs_of_masters_and_of_etcd_are_bounded(tmp_path):
    path = write(tmp_path / "master-0.log", "x" * 200)
    keeping = asyncio.ensure_future(keep_bounded(tmp_path, 100))
    await until(lambda: path.stat().st_size == 0, "it to be cut")
    keeping.cancel()


async def test_the_logs_of_a_job_go_once_the_job_is_deleted_and_nobody_writes_there(tmp_path):
    cluster = Cluster("kept")
    kept, gone, late = (write(tmp_path / job / "h-trainer-0-1.log", "x") for job in ("kept", "gone", "late"))
    cluster.written = [late]
    async with bounded(tmp_path, cluster):
        await until(lambda: not gone.parent.exists(), "the logs of the deleted job to go")
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 20, "more looks")
        assert kept.exists()
        assert late.exists(), "a process of the job still leaves"
        cluster.written = []
        await until(lambda: not late.parent.exists(), "they go then")


async def test_no_log_goes_while_etcd_is_away_or_lacks_the_job_for_a_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_logs, "GONE_S", 3600.0)
    cluster = Cluster()
    path = write(tmp_path / "a" / "h-trainer-0-1.log", "x")
    async with bounded(tmp_path, cluster):
        await until(lambda: cluster.asked > 5, "looks")
        cluster.away = True
        await until(lambda: cluster.asked > 10, "looks without etcd")
        assert path.exists()


async def test_the_oldest_logs_beyond_the_bound_go_but_none_that_is_written(tmp_path):
    cluster = Cluster("a", "b")
    written = write(tmp_path / "a" / "h-trainer-0-1.log", "x" * 60, age=9)
    oldest = write(tmp_path / "a" / "h-trainer-0-1.log.1", "x" * 60, age=8)
    older = write(tmp_path / "a" / "h-trainer-1-1.log", "x" * 60, age=7)
    newest = write(tmp_path / "b" / "h-trainer-2-1.log", "x" * 60, age=6)
    other = write(tmp_path / "b" / "h-trainer-2-1.begun", "", age=20)
    cluster.written = [written]
    async with bounded(tmp_path, cluster, logs_bytes=130):
        await until(lambda: not oldest.exists() and not older.exists(), "two logs to go")
        await until(lambda: cluster.asked > 10, "more looks")
    assert all(path.exists() for path in (written, newest, other))
