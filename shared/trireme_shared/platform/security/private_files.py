"""Folders and files that only this user can read, from the moment they exist.

    make_folder(DATA_DIR/job)   missing levels are made with 0700; one of ours that others may enter is closed
    open_private(path, "ab")    a new file gets 0600

What lies below a private folder is safe whatever its own mode is. Root reads everything, and so do processes
of the same user.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import InvalidArgument

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OPEN_TO_OTHERS = 0o077

log = telemetry.logger("private_files")


def make_folder(folder: Path) -> None:
    """`folder` and the missing ones above it, for this user alone. An existing one is closed if it is ours;
    one of another user is taken as it is (root may work in a user's folder). Raises OSError."""
    make_missing(folder)
    found = folder.stat()
    if found.st_uid == os.geteuid() and found.st_mode & OPEN_TO_OTHERS:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~OPEN_TO_OTHERS)


def make_missing(folder: Path) -> None:
    """As `make_folder`, but what exists already keeps its mode. Raises OSError."""
    if folder.is_dir():
        return
    make_missing(folder.parent)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_own_folder(folder: Path) -> None:
    """For a place that other users can guess, such as one below /tmp: if one of them was there first, nothing
    may be written or run there. Raises InvalidArgument, OSError."""
    make_missing(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        msg = f"{folder} can be written by others, and code would be run from there"
        raise InvalidArgument(msg, hint="remove it, or name a folder of your own")
    make_folder(folder)


def open_private(path: Path, mode: str) -> IO[Any]:
    """As `open`; a file that does not exist yet is made with 0600. Unbuffered in binary modes. Raises
    OSError."""
    binary = "b" in mode
    return open(path, mode, 0 if binary else -1, None if binary else "utf-8", opener=_opener)


def write_text(path: Path, text: str) -> None:
    """Not atomic. Raises OSError."""
    with open_private(path, "w") as file:
        file.write(text)


def replace(path: Path, content: bytes, mode: int = FILE_MODE) -> None:
    """The file appears complete, is on disk, and never had wider permissions than `mode`. One writer at a
    time. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


LOCK = "owner.lock"
NEW = "owner.new"


SOCKET_PATH_BYTES = 107  # a kernel's limit
FOLDER_BYTES = 80  # of a folder for sockets: their names need the rest
NAME_BYTES = 24  # of a folder for sockets in the one that holds it
SHORT_PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  a folder of our own is made there
LOOK_S = 2.0
LATER_S = 60.0  # until it is tried again after it could not be made
USED_EVERY_S = 3600.0  # programs that clean temporary folders take what nobody used for days


def place_of_sockets() -> Path:
    """Where folders for sockets are made: the system's temporary folder (TMPDIR) if its path is short enough
    for them, else a short one. Raises InvalidArgument if there is none."""
    for place in _places():
        if len(os.fsencode(place)) + NAME_BYTES <= FOLDER_BYTES and os.access(place, os.W_OK | os.X_OK):
            return place
    usual = Path(tempfile.gettempdir())
    size = len(os.fsencode(usual))
    msg = (
        f"the temporary folder {usual} has a path of {size} bytes, and UNIX sockets in it would have too many"
    )
    raise InvalidArgument(msg, hint=f"set TMPDIR to a folder of at most {FOLDER_BYTES - NAME_BYTES} bytes")


def _places() -> tuple[Path, ...]:
    """The best first."""
    usual = Path(tempfile.gettempdir())
    return (usual, Path(os.environ.get("XDG_RUNTIME_DIR") or usual), *map(Path, SHORT_PLACES))


def told_of_sockets() -> str:
    """A sentence for the user if sockets do not lie where TMPDIR says, else "". Raises InvalidArgument."""
    usual, place = Path(tempfile.gettempdir()), place_of_sockets()
    if place == usual:
        return ""
    size = len(os.fsencode(usual))
    return (
        f"UNIX sockets are made in {place}: the temporary folder {usual} has a path of {size} bytes, too many"
    )


class SocketFolder:
    """A folder for UNIX sockets that only its user can enter. It lies in the system's temporary folder,
    because the path of a socket may have only 107 bytes. So nobody else removes one whose owner was killed:
    the next process of this user does, whatever it works on.

    make ─► a new name, 0700 ─► `owner.lock`, held by its owner until `remove` or its death
    sweep_socket_folders: no owner holds it ─► removed
    somebody cleans the temporary folder ─► `look` makes it again

    `path`: a name of an earlier one that is made again, else None: a new name that begins with `prefix`.
    Raises FileExistsError: somebody else has made that.
    """

    def __init__(self, prefix: str, path: Path | None = None) -> None:
        if path is None:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=place_of_sockets()))
        else:
            make_missing(path.parent)
            path.mkdir(mode=FOLDER_MODE)
        self.path = path
        self.lock = self._locked()
        self._used = clock.monotonic()

    def __repr__(self) -> str:
        return f"<SocketFolder {self.path}>"

    @property
    def is_there(self) -> bool:
        """Whether the folder and its lock are those that were made here."""
        try:
            return os.path.samestat(os.fstat(self.lock.fileno()), (self.path / LOCK).lstat())
        except OSError:
            return False

    def look(self) -> bool:
        """Whether it had to be made again. It counts as used now and then. Raises OSError: it cannot be made,
        or it is somebody else's now."""
        if self.is_there:
            self._use()
            return False
        make_missing(self.path.parent)
        with suppress(FileExistsError):  # the files in it alone are gone, or a member has made it again
            self.path.mkdir(mode=FOLDER_MODE)
        make_own_folder(self.path)
        self.lock.close()
        self.lock = self._locked()
        return True

    async def keep(self) -> None:
        """Until cancelled: look now and then."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self.look():
                    log.warning("socket_folder_made_again", folder=str(self.path))
            except (OSError, InvalidArgument) as error:
                log.warning("socket_folder_lost", folder=str(self.path), cause=str(error))
                await asyncio.sleep(LATER_S)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()

    def _locked(self) -> IO[bytes]:
        lock = open_private(self.path / NEW, "ab")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (self.path / NEW).rename(self.path / LOCK)  # it is held from the moment that others can see it
        return lock

    def _use(self) -> None:
        if (now := clock.monotonic()) - self._used < USED_EVERY_S:
            return
        self._used = now
        for path in (self.path, *self.path.iterdir()):
            with suppress(OSError):
                os.utime(path)


def sweep_socket_folders(prefix: str) -> None:
    """Remove the folders of this user whose owner has died. Those without a lock are left: they are just
    being made."""
    for folder in (found for place in set(_places()) for found in place.glob(f"{prefix}*")):
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
