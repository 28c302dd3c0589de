"""A real file system of a small size, for what only a full or a read-only disk shows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*arguments: str) -> None:
    """Skips the test where this is not permitted (no root, or a container without the capability)."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip() or 'not permitted'}")


@contextmanager
def disk_of(folder: Path, size: str) -> Iterator[Path]:
    """The new `folder` as a disk of that size (as of mount: `512k`)."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", "512k") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler
