"""What Trireme writes belongs to its user alone, from the moment it exists."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme_shared.platform.security import private_files
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    """So that every missing bit is ours."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def no_later_chmod(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was open to others until now")

    for owner, name in ((os, "chmod"), (os, "fchmod"), (Path, "chmod")):
        monkeypatch.setattr(owner, name, refuse)


def test_folders_and_files_are_private_from_the_start(tmp_path, no_later_chmod):
    folder = tmp_path / "data" / "job" / "logs"
    private_files.make_folder(folder)
    assert [mode(each) for each in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    private_files.write_text(folder / "spec.json", "{}")
    with private_files.open_private(folder / "log", "ab") as log:
        log.write(b"line\n")
    files.write_bytes(str(tmp_path / "storage" / "checkpoints" / "part"), b"values")
    with files.write_atomic(str(tmp_path / "storage" / "model")) as model:
        model.write(b"values")
        assert [mode(each) for each in (tmp_path / "storage").glob(".model*")] == [0o600], (
            "also before it is complete"
        )
    written = (
        folder / "spec.json",
        folder / "log",
        tmp_path / "storage/checkpoints/part",
        tmp_path / "storage/model",
    )
    assert [mode(each) for each in written] == [0o600] * 4
    assert mode(tmp_path / "storage") == mode(tmp_path / "storage/checkpoints") == 0o700
    assert (folder / "log").read_bytes() == b"line\n"


def test_a_folder_of_an_earlier_version_is_closed_and_those_above_it_stay(tmp_path):
    above, folder = tmp_path / "project", tmp_path / "project" / "job"
    above.mkdir(mode=0o755)
    folder.mkdir(mode=0o755)
    private_files.make_folder(folder)
    assert (mode(above), mode(folder)) == (0o755, 0o700)
    private_files.make_missing(above)
    assert mode(above) == 0o755


def test_a_folder_that_others_can_write_or_made_before_us_is_not_used_for_code(tmp_path):
    own = tmp_path / "sources"
    private_files.make_own_folder(own)
    private_files.make_own_folder(own)
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o777)
    link = tmp_path / "link"
    link.symlink_to(own)
    places = [open_folder, link]
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 65534, 65534)
        places.append(foreign)
    for place in places:
        with pytest.raises(InvalidArgument, match="can be written by others"):
            private_files.make_own_folder(place)
    assert mode(open_folder) == 0o777
