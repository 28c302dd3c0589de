"""children.jsonl in a run's folder: which processes the launcher started, and how they ended. Other commands
read it."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security import private_files

EVENTS_FILE = "children.jsonl"
AS_ASKED = "left, as asked"  # the cause of an end by SIGTERM, in the words of the master
ENDS = ("died", "lost_lease", "left", "given_up")


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """`what`: started, died, lost_lease (ended because of that), left (by itself, after it was asked to),
    held_up (its code keeps the interpreter), given_up (one of these ends, and it is not started again),
    restarted, finished, lease_left, unrecorded (the file cannot be written); of a launcher: grown, shrunk,
    waiting (for what). `cause`: how it ended. `pid`: 0 if it is not known."""

    child: str
    what: str
    cause: str = ""
    pid: int = 0

    @property
    def end(self) -> str:
        """`died (SIGKILL, pid 7)`, `lost its lease (frozen for 9 s, pid 7)`, `left, as asked (pid 7)`."""
        told = [f"pid {self.pid}"] if self.pid else []
        if self.cause == AS_ASKED:
            return f"{AS_ASKED} ({', '.join(told)})" if told else AS_ASKED
        what = "lost its lease" if self.what == "lost_lease" else "died"
        return f"{what} ({', '.join([self.cause, *told])})"


class EventFile:
    """Where one launcher writes. What a full disk does not take is kept, and written once there is room."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS_FILE
        self._waiting: deque[bytes] = deque()

    def append(self, event: ChildEvent) -> None:
        """Append one line. Raises OSError: it waits for the next `append` or `write_waiting`."""
        self._waiting.append(json.dumps({"time": clock.timestamp(), **asdict(event)}).encode() + b"\n")
        self.write_waiting()

    def write_waiting(self) -> None:
        """Raises OSError if there is still no room."""
        if not self._waiting:
            return
        with private_files.open_private(self._path, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):  # of a line only a part was written
                _write(file, b"\n")
            while self._waiting:
                _write(file, self._waiting[0])
                self._waiting.popleft()


def _write(file: IO[bytes], line: bytes) -> None:
    while line:
        line = line[file.write(line) or 0 :]


def restarts_in(run_dir: Path) -> Counter[str]:
    """How often each child was started again, in all runs of the job that resumed each other."""
    return Counter(event["child"] for event in read_events(run_dir) if event["what"] == "restarted")


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All complete lines; a launcher that was killed, or had no room, may have left a part of one."""
    try:
        text = (run_dir / EVENTS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [event for line in text.split("\n")[:-1] if (event := _event_of(line)) is not None]


def _event_of(line: str) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
