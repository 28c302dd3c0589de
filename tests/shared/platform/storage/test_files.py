"""Files by URL, on this machine and in memory://: globs, atomic writes, errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError, InvalidArgument


@pytest.fixture(params=["local", "file", "memory"])
def place(request, tmp_path) -> str:
    return {"local": str(tmp_path), "file": tmp_path.as_uri(), "memory": "memory://place"}[request.param]


def test_what_is_written_is_read(place):
    url = files.join(place, "deep", "er", "file")
    assert not files.exists(url)
    files.write_bytes(url, b"one")
    files.write_bytes(url, b"three")
    assert files.read_bytes(url) == b"three"
    assert files.size(url) == 5
    assert files.expand(url) == files.expand(files.join(place, "deep", "*", "f*"))


def test_a_glob_gives_files_only_sorted(place):
    for name in ("b.txt", "a.txt", "c.bin", "d.txt/inner"):
        files.write_bytes(files.join(place, name), b"")
    found = files.expand(files.join(place, "*.txt"))
    assert [url.rsplit("/", 1)[1] for url in found] == ["a.txt", "b.txt"]
    assert files.expand(files.join(place, "*.none")) == files.expand(files.join(place, "none")) == []


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path):
    path = tmp_path / "x[1].txt"
    path.write_text("")
    assert files.expand(str(path)) == [str(path)]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(place, tmp_path):
    url = files.join(place, "file")
    files.write_bytes(url, b"old")
    with pytest.raises(RuntimeError), files.write_atomic(url) as file:
        file.write(b"new")
        raise RuntimeError
    assert files.read_bytes(url) == b"old"
    assert files.expand(files.join(place, "*")) == files.expand(url)
    assert not [path for path in tmp_path.iterdir() if path.name != "file"]


def test_a_writer_that_is_killed_leaves_nothing_in_the_temporary_folder(tmp_path):
    """Stores that are not S3 (gs://, az://, here memory://) get a file of this machine as a whole."""
    code = (
        "import os, signal\nfrom trireme_shared.platform.storage import files\n"
        "with files.write_atomic('memory://place/file') as file:\n"
        "    file.write(bytes(1 << 20))\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (-signal.SIGKILL, [])


def test_readers_see_the_old_or_the_new_file_never_a_part(tmp_path):
    url = str(tmp_path / "file")
    contents = {bytes([n]) * 100_000 for n in range(2)}
    files.write_bytes(url, min(contents))
    writers = [
        threading.Thread(target=lambda c=c: [files.write_bytes(url, c) for _ in range(20)]) for c in contents
    ]
    for writer in writers:
        writer.start()
    seen = {files.read_bytes(url) for _ in range(100)}
    for writer in writers:
        writer.join()
    assert seen <= contents


def test_absolute_makes_local_paths_independent_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.absolute("data/*.txt") == str(tmp_path / "data" / "*.txt")
    assert files.absolute("/data/x") == files.absolute("file:///data/x") == "/data/x"
    assert files.absolute("memory://data/*") == "memory://data/*"


def test_local_path_is_none_for_other_file_systems(tmp_path):
    assert files.local_path(tmp_path.as_uri()) == tmp_path
    assert files.local_path("memory://x") is None


def test_chains_of_protocols_are_kept():
    files.write_bytes("memory://chain/a.txt", b"x")
    (found,) = files.expand("simplecache::memory://chain/*.txt")
    assert found.startswith("simplecache::memory://")
    assert files.read_bytes(found) == b"x"


def test_an_unknown_protocol_is_told():
    with pytest.raises(InvalidArgument, match="no way to open nosuch://x"):
        files.expand("nosuch://x")


@pytest.mark.parametrize(
    "error", [OSError("disk on fire"), ValueError("disk on fire"), KeyError("disk on fire")]
)
def test_reading_turns_what_goes_wrong_into_one_error_with_the_url(error):
    with (
        pytest.raises(DatasetError, match=r"u cannot be read as Parquet: .*disk on fire") as caught,
        files.reading("u", "Parquet"),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert caught.value.details == {"url": "u"}
