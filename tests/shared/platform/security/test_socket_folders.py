"""Folders for sockets: those of living processes stay, those of dead ones are removed by anybody of this
user."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.private_files import SocketFolder, sweep_socket_folders
from trireme_shared.protocol.errors import InvalidArgument

PREFIX = "trireme-test-"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short enough for sockets, whatever the test is called."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files.tempfile, "tempdir", str(tmp_path))


def test_only_folders_whose_owner_is_dead_are_removed(tmp_path: Path) -> None:
    held, left = SocketFolder(PREFIX), SocketFolder(PREFIX)
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
    just_made, elsewhere = tmp_path / f"{PREFIX}new", tmp_path / "data"
    just_made.mkdir()
    elsewhere.mkdir()
    (elsewhere / private_files.LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").touch()
    (left.path / "client:0").touch()
    sweep_socket_folders(PREFIX)
    assert left.path.exists(), "both have an owner"
    left.lock.close()  # as the kernel does when its owner dies
    sweep_socket_folders(PREFIX)
    assert not left.path.exists()
    assert (elsewhere / private_files.LOCK).exists()
    assert (held.path.exists(), just_made.exists()) == (True, True)
    held.remove()
    assert not held.path.exists()


def test_a_name_is_made_again_unless_somebody_else_has_it() -> None:
    folder = SocketFolder(PREFIX)
    folder.remove()
    again = SocketFolder(PREFIX, folder.path)
    assert again.path == folder.path
    with pytest.raises(FileExistsError):
        SocketFolder(PREFIX, folder.path)
    again.remove()


def test_a_long_temporary_folder_is_not_used_for_sockets_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket may have 107 bytes, and its name needs some of them."""
    assert private_files.told_of_sockets() == ""
    long, short = tmp_path / ("d" * 60), tmp_path / "s"
    for folder in (long, short):
        folder.mkdir()
    monkeypatch.setattr(private_files.tempfile, "tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    folder = SocketFolder(PREFIX)
    try:
        assert folder.path.parent == short
        assert private_files.told_of_sockets().startswith(f"UNIX sockets are made in {short}: ")
        assert str(long) in private_files.told_of_sockets()
        left = SocketFolder(PREFIX)
        left.lock.close()
        sweep_socket_folders(PREFIX)
        assert (left.path.exists(), folder.path.exists()) == (False, True)
    finally:
        folder.remove()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(private_files, "SHORT_PLACES", (str(tmp_path / "missing"),))
    with pytest.raises(InvalidArgument, match=f"{long} has a path of {len(str(long))} bytes") as caught:
        SocketFolder(PREFIX)
    assert "set TMPDIR to a folder of at most 56 bytes" in caught.value.hint
    sweep_socket_folders(PREFIX)


@pytest.mark.parametrize("gone", ["the folder", "what is in it", "all above it"])
def test_a_folder_that_somebody_deleted_is_made_again_with_its_lock(tmp_path: Path, gone: str) -> None:
    folder = SocketFolder(PREFIX, tmp_path / "above" / f"{PREFIX}1")
    assert folder.look() is False
    if gone == "what is in it":
        (folder.path / private_files.LOCK).unlink()
    else:
        shutil.rmtree(folder.path if gone == "the folder" else folder.path.parent)
    assert folder.look() is True
    assert folder.look() is False
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    sweep_socket_folders(PREFIX)
    assert folder.is_there
    folder.remove()


def test_a_folder_that_is_somebody_elses_now_is_not_taken(tmp_path: Path) -> None:
    folder = SocketFolder(PREFIX, tmp_path / f"{PREFIX}1")
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    folder.path.chmod(0o777)
    with pytest.raises(InvalidArgument, match="can be written by others"):
        folder.look()
    folder.remove()


def test_what_is_used_looks_so_to_programs_that_clean_temporary_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_files, "USED_EVERY_S", 0.0)
    folder = SocketFolder(PREFIX)
    (folder.path / "client:0").touch()
    for path in (folder.path, folder.path / "client:0", folder.path / private_files.LOCK):
        os.utime(path, (0, 0))
    assert folder.look() is False
    assert all(path.stat().st_mtime > 1e9 for path in (folder.path, *folder.path.iterdir()))
    folder.remove()
