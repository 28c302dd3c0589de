"""Whose fault an error of reading is: the data's, or the machine's or storage's. Only the first may cost
records."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
from contextlib import nullcontext

import pytest

from trireme_shared.platform.runtime.service import OPEN_FILES
from trireme_shared.platform.storage import compressed, files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.platform.storage.files import kept_open, trouble_in_user_code, trouble_of
from trireme_shared.protocol.errors import DatasetError, ResourceExhausted, StorageUnreachable

MACHINE = ("EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EDQUOT", "EIO", "ESTALE")
STORAGE = ("ETIMEDOUT", "ECONNRESET", "ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "ENOTCONN")
DATA = ("ENOENT", "EACCES", "EISDIR", "EINVAL")


def os_error(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("name", MACHINE + STORAGE + DATA)
def test_an_error_of_the_operating_system_is_the_fault_of_one(name):
    kind = ResourceExhausted if name in MACHINE else StorageUnreachable if name in STORAGE else DatasetError
    with pytest.raises(kind, match=r"place/x.npy"), files.reading("place/x.npy", ".npy"):
        raise os_error(name)


def test_a_file_is_not_missing_because_its_server_does_not_answer():
    """fsspec tells every failure of an HTTP server as a missing file."""
    with pytest.raises(StorageUnreachable, match=r"x.npy"), files.reading("https://host/x.npy", ".npy"):
        raise FileNotFoundError("https://host/x.npy") from os_error("ECONNRESET")
    with pytest.raises(DatasetError, match="does not exist"), files.reading("https://host/x.npy", ".npy"):
        raise FileNotFoundError("https://host/x.npy")


@pytest.mark.parametrize("name", MACHINE + STORAGE + DATA)
def test_a_users_reader_is_excused_for_what_the_system_says(name):
    error = ValueError("the record could not be made")
    error.__cause__ = os_error(name)
    assert (trouble_in_user_code(error, "item 7") is not None) == (name not in DATA)


def test_a_users_own_time_limit_may_be_the_records_fault():
    """One record may pass it each time."""
    assert trouble_in_user_code(TimeoutError("decoding took 5 s"), "item 7") is None
    assert isinstance(trouble_of(TimeoutError("no answer"), "x.npy"), StorageUnreachable)


def test_an_error_that_is_its_own_cause_ends_the_search():
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert trouble_of(first, "x") is None


def test_too_many_open_files_names_the_limit_and_what_to_do():
    found = trouble_of(os_error("EMFILE"), "x.npy")
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in found.message
    assert "ulimit -n" in found.hint


def test_a_temporary_file_that_cannot_be_made_is_no_fault_of_the_data(monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: (_ for _ in ()).throw(os_error("EMFILE")))
    with pytest.raises(ResourceExhausted, match="the limit of open files is reached"):
        compressed.copy_of("x.csv.gz", io.BytesIO(b"x"))


def test_a_disk_that_fails_while_a_file_is_decompressed_is_no_damage_of_the_file(monkeypatch):
    class Failing(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, _):
            raise os_error("EIO")

    monkeypatch.setattr(
        "trireme_shared.platform.storage.compressed.files.open_read", lambda _: nullcontext(Failing())
    )
    for name in ("x.csv.gz", "x.csv.bz2", "x.csv.xz", "x.csv.zst"):
        with pytest.raises(ResourceExhausted, match=f"{name} cannot be read now"), scanning(name) as source:
            source.read()


def test_readers_keep_a_share_of_what_a_process_may_open(monkeypatch):
    for limit, share in ((256, 32), (8, 1), (2, 1), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert kept_open() == share


def test_a_service_raises_its_soft_limit_to_the_hard_one():
    program = (
        "import resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\nasync def main(_):\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n    return 0\n"
        "from trireme_shared.platform.runtime import service\nservice.run(main)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    soft, hard = map(int, told.stdout.split())
    assert soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES))
