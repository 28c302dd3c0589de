"""Folders for UNIX sockets that only their user can enter. They lie in the system's temporary folder, because the path of a socket may
have only 107 bytes. So nobody else removes one whose owner was killed: the next process of this user does, whatever it works on.

make ─► a new name, 0700 ─► `owner.lock`, held by its owner until `remove` or its death        sweep: no owner holds it ─► removed
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from trireme_shared.platform.security import private_files

LOCK = "owner.lock"
NEW = "owner.new"


class SocketFolder:
    """`path`: a name of an earlier one that is made again, else None: a new name that begins with `prefix`. Raises FileExistsError:
    somebody else has made that."""

    def __init__(self, prefix: str, path: Path | None = None) -> None:
        if path is None:
            path = Path(tempfile.mkdtemp(prefix=prefix))
        else:
            path.mkdir(mode=0o700)
        self.path = path
        self.lock: IO[bytes] = private_files.open_private(path / NEW, "ab")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (path / NEW).rename(path / LOCK)  # it is held from the moment that others can see it

    def __repr__(self) -> str:
        return f"<SocketFolder {self.path}>"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def sweep(prefix: str) -> None:
    """Remove the folders of this user whose owner has died. Those without a lock are left: they are just being made."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it vanishes, or is held
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
