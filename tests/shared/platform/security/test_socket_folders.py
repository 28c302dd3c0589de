"""Folders for sockets: those of living processes stay, those of dead ones are removed by anybody of this
user."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.private_files import SocketFolder, sweep_socket_folders

PREFIX = "trireme-test-"


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
