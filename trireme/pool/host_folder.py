"""The folder of a host agent: DATA_DIR/{agent.lock, agent.json, logs/<job>/<member>-<epoch>.log, sources/, sockets}.

One agent at a time: it holds a flock while it lives. So whoever gets the lock knows that the agent before is dead, and may revoke
the lease that agent.json names instead of waiting until it runs out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument

LOCK, AGENT_FILE = "agent.lock", "agent.json"


class HostFolder:
    """Made by `opened`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sources = place / "sources"

    def __repr__(self) -> str:
        return f"<HostFolder {self.place}>"

    @property
    def last_lease(self) -> int:
        """Of the agent before; 0: it had none."""
        lease = (read_json(self.place / AGENT_FILE) or {}).get("lease", 0)
        return lease if isinstance(lease, int) else 0

    def note_lease(self, lease: int) -> None:
        """If it cannot be written, the next agent waits until the lease has run out."""
        with contextlib.suppress(OSError):
            write_json(self.place / AGENT_FILE, {"pid": os.getpid(), "lease": lease})

    def log_of(self, job: str, member: str, epoch: int) -> Path:
        return self.place / "logs" / job / f"{member}-{epoch}.log"


@contextlib.contextmanager
def opened(place: Path) -> Iterator[HostFolder]:
    """Raises InvalidArgument if it cannot be written, Conflict if another agent has it."""
    place = place.absolute()
    try:
        private_files.make_folder(place)
        lock = private_files.open_private(place / LOCK, "a")
    except OSError as error:
        msg = f"the data directory {place} cannot be written: {error.strerror}"
        raise InvalidArgument(msg, hint="choose another in TRIREME_DATA_DIR") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = (read_json(place / AGENT_FILE) or {}).get("pid", "unknown")
            msg = f"another host agent (process {owner}) uses {place}"
            raise Conflict(msg, hint="give each agent a TRIREME_DATA_DIR and a TRIREME_NAME of its own") from error
        yield HostFolder(place)
