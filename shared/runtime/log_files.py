"""Reading the log files of members, dead ones included: JSON lines of ours between whatever a user's script printed.

file ─► lines from its end backwards, until enough ─► times ─► redacted                cursor: the byte after the last whole line
A line without a time of its own (a `print`) has that of the line before it.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 64 << 10  # longer lines are cut
BLOCK_BYTES = 64 << 10
SCAN_BYTES = 64 << 20  # of one file, at most: to find where a time begins
NEWS_BYTES = 1 << 20  # of one file at once
_TOKEN = re.compile(r"trireme_(admin|member|viewer)_[A-Za-z0-9_-]{20,}")


@dataclass(frozen=True, slots=True)
class Line:
    """`time`: RFC 3339 UTC; empty if no line before it, or right after it, has one."""

    member: str
    time: str
    text: str


def redacted(text: str) -> str:
    """A token that a script has printed is not shown."""
    return _TOKEN.sub(r"trireme_\1_***", text)


def is_of(member: str, wanted: str) -> bool:
    """Whether a log's member is meant by a name: `trainer-0` means `trainer-0`, `trainer-0-2` (a later epoch), and is meant by its own
    id `trainer-0-9f2c51ab03de`."""
    return member == wanted or member.startswith(f"{wanted}-") or wanted.startswith(f"{member}-")


class LogFile:
    """One member's log. `cursor`: the byte from which `news` reads on."""

    def __init__(self, path: Path, member: str = "") -> None:
        self.path, self.member, self.cursor = path, member or path.stem, 0
        self._time = ""

    def __repr__(self) -> str:
        return f"<LogFile {self.member} at byte {self.cursor}>"

    def last(self, count: int, since: str = "") -> list[Line]:
        """The last lines, at most `count`, and none before `since`. The cursor is then at their end. Raises OSError."""
        with self.path.open("rb") as file:
            end = _end_of_lines(file.fileno(), os.fstat(file.fileno()).st_size)
            found: list[bytes] = []
            self.cursor, self._time = end, ""
            for line in _backwards(file.fileno(), end):
                time = _time_of(line) if since else ""
                if time and time < since:
                    self._time = time  # of the prints that follow it
                    break
                if len(found) >= count:
                    break
                found.append(line)
        return [line for line in self._lines(reversed(found)) if not since or line.time >= since]

    def news(self) -> list[Line]:
        """What was written since. A file that was cut is read from its beginning. Raises OSError."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.cursor:
                self.cursor = 0
            block = os.pread(file.fileno(), min(NEWS_BYTES, size - self.cursor), self.cursor)
        whole = block.rfind(b"\n") + 1
        if not whole and len(block) >= LINE_BYTES:
            whole = len(block)  # a line without an end
        self.cursor += whole
        return self._lines(block[:whole].splitlines())

    def _lines(self, lines: Iterable[bytes]) -> list[Line]:
        texts = [(line[:LINE_BYTES].decode(errors="replace"), _time_of(line)) for line in lines]
        first = self._time or next((time for _, time in texts if time), "")
        made = []
        for text, time in texts:
            self._time = max(time or self._time or first, self._time)
            made.append(Line(self.member, self._time, redacted(text)))
        return made


class Logs:
    """All log files that `paths` names, also those that appear later, one after the other in time."""

    def __init__(self, paths: Callable[[], Iterable[Path]], wanted: str = "") -> None:
        self._paths, self._wanted = paths, wanted
        self._files: dict[Path, LogFile] = {}

    @property
    def members(self) -> list[str]:
        return sorted(file.member for file in self._found().values())

    def last(self, count: int, since: str = "") -> list[Line]:
        lines = heapq.merge(*(_read(file.last, count, since) for file in self._found().values()), key=_when)
        return list(lines)[-count:] if count else []

    def news(self) -> list[Line]:
        """What was written since `last`, or since the `news` before."""
        return list(heapq.merge(*(_read(file.news) for file in self._found().values()), key=_when))

    def _found(self) -> dict[Path, LogFile]:
        for path in self._paths():
            if path not in self._files and (not self._wanted or is_of(path.stem, self._wanted)):
                self._files[path] = LogFile(path)
        return self._files


def _read(read: Callable[..., list[Line]], *arguments: object) -> list[Line]:
    try:
        return read(*arguments)
    except OSError:  # it was deleted, or is not ours
        return []


def _when(line: Line) -> str:
    return line.time


def _time_of(line: bytes) -> str:
    """Of a line that a logger wrote."""
    if not line.startswith(b"{") or len(line) > LINE_BYTES:
        return ""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    time = found.get("timestamp") or found.get("ts")
    return time if isinstance(time, str) else ""


def _end_of_lines(descriptor: int, size: int) -> int:
    """The byte after the last line that has ended."""
    start = max(0, size - LINE_BYTES)
    return start + os.pread(descriptor, size - start, start).rfind(b"\n") + 1 if size else 0


def _backwards(descriptor: int, end: int) -> Iterator[bytes]:
    """Whole lines before byte `end`, the last one first."""
    rest, position, stop = b"", end, max(0, end - SCAN_BYTES)
    begins = True
    while position > stop:
        start = max(stop, position - BLOCK_BYTES)
        lines = (os.pread(descriptor, position - start, start) + rest).split(b"\n")
        position = start
        if begins:
            lines.pop()  # what follows the last newline
        begins = False
        rest = lines[0] if len(lines[0]) <= LINE_BYTES else lines[0][:LINE_BYTES]
        yield from reversed(lines[1:])
    if end and not stop:
        yield rest
