"""The folder of a job's runs: one run at a time, and how it is found."""

from __future__ import annotations

import asyncio
import os
import socket
import stat

import pytest

from trireme.launch import run_folder
from trireme.settings import UsageError
from trireme.view.child_events import ChildEvent, EventFile, restarts_in
from trireme_shared.platform.security.private_files import SocketFolder


def test_a_job_runs_once_at_a_time(tmp_path):
    with run_folder.opened(tmp_path, "ctr"), run_folder.opened(tmp_path, "other"):
        busy = rf"job ctr is already running .*process {os.getpid()}.*--job NAME"
        with pytest.raises(UsageError, match=busy), run_folder.opened(tmp_path, "ctr"):
            pytest.fail("two runs in one folder")


def test_a_data_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"cannot be written: .*--data-dir"),
        run_folder.opened(tmp_path / "file", "ctr"),
    ):
        pytest.fail("there is no such folder")


def test_the_last_run_is_found_without_its_name(tmp_path):
    assert run_folder.read_run_file(tmp_path, None) is None
    for time_s, job in enumerate(("old", "new")):
        (tmp_path / job).mkdir()
        run_folder.write_json(tmp_path / job / run_folder.RUN_FILE, {"job": job})
        os.utime(tmp_path / job / run_folder.RUN_FILE, (time_s, time_s))
    assert run_folder.read_run_file(tmp_path, None) == {"job": "new"}
    assert run_folder.read_run_file(tmp_path, "old") == {"job": "old"}


def test_sockets_lie_in_a_short_private_folder_that_no_end_of_a_run_leaves_behind(tmp_path):
    with run_folder.sockets(tmp_path) as made:
        folder = made.path
        (folder / "pserver-0.sock").touch()
        assert (tmp_path / "sockets").samefile(folder)
        assert (stat.S_IMODE(folder.stat().st_mode), len(str(folder)) < 60) == (0o700, True)
    assert not folder.exists()
    assert not list(tmp_path.iterdir())


def test_sockets_of_a_killed_run_are_swept_at_the_next_start(tmp_path):
    """Whatever job they were of; those of a run that goes on stay."""
    killed, going_on = SocketFolder(run_folder.PREFIX), SocketFolder(run_folder.PREFIX)
    (killed.path / "pserver-0.sock").touch()
    (tmp_path / "sockets").symlink_to(killed.path)
    killed.lock.close()
    try:
        with run_folder.sockets(tmp_path) as folder:
            assert [killed.path.exists(), going_on.path.exists()] == [False, True]
            assert (tmp_path / "sockets").samefile(folder.path)
    finally:
        going_on.remove()


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} of 127\.0\.0\.1 is not free"):
            run_folder.check_port("127.0.0.1", port)
    run_folder.check_port("127.0.0.1", port)


async def test_the_time_of_runs_that_resume_each_other_adds_up(tmp_path):
    first = run_folder.TimeSpent(tmp_path)
    assert first.seconds < 60
    run_folder.write_json(tmp_path / run_folder.TIME_FILE, {"seconds": 1000.0})
    second = run_folder.TimeSpent(tmp_path)
    second.save()
    third = run_folder.TimeSpent(tmp_path)
    assert 1000 <= second.seconds <= 1060
    assert 1000 <= third.seconds <= second.seconds + 60
    keeping = asyncio.ensure_future(third.keep())
    await asyncio.sleep(0)
    keeping.cancel()
    assert run_folder.read_json(tmp_path / run_folder.TIME_FILE)["seconds"] >= 1000
    second.save()  # a folder that is gone or full is no error
    run_folder.TimeSpent(tmp_path / "gone").save()


def test_restarts_of_runs_that_resume_each_other_add_up(tmp_path):
    for what in ("started", "died", "restarted", "started", "died", "restarted"):
        EventFile(tmp_path).append(ChildEvent("trainer-0", what))
    EventFile(tmp_path).append(ChildEvent("etcd", "restarted"))
    assert restarts_in(tmp_path) == {"trainer-0": 2, "etcd": 1}
