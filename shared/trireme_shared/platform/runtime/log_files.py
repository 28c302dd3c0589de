"""Reading the log files of members, dead ones included: JSON lines of ours between whatever a user's script
printed.

file ─► lines from its end backwards, until enough ─► times ─► redacted
cursor: the byte after the last whole line
A line without a time of its own (a `print`) has that of the line before it. A line is shown from its
beginning or not at all: nobody could tell a token by its end.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 64 << 10  # longer lines are cut
TOKEN_BYTES = 128  # longer than any token: one that begins before the cut is known as such
BLOCK_BYTES = 64 << 10
SCAN_BYTES = 64 << 20  # of one file, at most: to find where a time begins
NEWS_BYTES = 1 << 20  # of one file at once
PAUSE_LINES = 50
_TOKEN = re.compile(r"trireme_(admin|member|viewer|login)_[A-Za-z0-9_-]{20,}")


@dataclass(frozen=True, slots=True)
class Line:
    """`time`: RFC 3339 UTC; empty if no line before it, or right after it, has one. `end`: the byte after it
    in its file."""

    member: str
    time: str
    text: str
    end: int = 0


def redacted(text: str) -> str:
    """A token that a script has printed is not shown."""
    return _TOKEN.sub(r"trireme_\1_***", text)


def is_of(member: str, wanted: str) -> bool:
    """Whether a log's member is meant by a name: `trainer-0` means `trainer-0`, `trainer-0-2` (a later
    epoch), and is meant by its own id `trainer-0-9f2c51ab03de`."""
    return member == wanted or member.startswith(f"{wanted}-") or wanted.startswith(f"{member}-")


class LogFile:
    """One member's log. `cursor`: the byte from which `news` reads on. `begin`: where the lines of `last`
    begin. `pause` is called after every PAUSE_LINES lines: other threads of the process may have something to
    do."""

    def __init__(self, path: Path, member: str = "", *, pause: Callable[[], None] = lambda: None) -> None:
        self.path, self.member, self.cursor = path, member or path.stem, 0
        self.begin = 0
        self._time, self._pause = "", pause

    def __repr__(self) -> str:
        return f"<LogFile {self.member} at byte {self.cursor}>"

    def last(
        self, count: int, since: str = "", *, before: int | None = None, most: int = SCAN_BYTES
    ) -> list[Line]:
        """The last lines that end at byte `before` (None: of all), at most `count`, none before `since`, and
        about `most` bytes. The cursor is then at their end. Raises OSError."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = _end_of_lines(file.fileno(), size if before is None else min(before, size))
            found: list[tuple[bytes, int]] = []
            self.cursor, self.begin, self._time = end, max(0, end - SCAN_BYTES), ""
            begin = end
            for line, start in _backwards(file.fileno(), end):
                time = _time_of(line) if since else ""
                if time and time < since:
                    self._time = time  # of the prints that follow it
                    break
                if len(found) >= count or most <= 0:
                    break
                found.append((line, begin))
                most -= begin - start
                self.begin = begin = start
            self._time = self._time or _time_before(file.fileno(), self.begin)
        return [line for line in self._lines(found[::-1]) if not since or line.time >= since]

    def news(self, *, count: int = sys.maxsize, most: int = NEWS_BYTES) -> list[Line]:
        """What was written since: at most `count` lines and `most` bytes. A file that was cut is read from
        its beginning. Raises OSError."""
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.cursor:
                self.cursor = 0
            start = max(0, self.cursor - 1)
            block = os.pread(file.fileno(), most, start)
        place = self.cursor - start
        if place and block[:1] not in (b"\n", b""):  # within a line, which was cut
            place = block.find(b"\n") + 1 or len(block)
        found: list[tuple[bytes, int]] = []
        while len(found) < count and (end := block.find(b"\n", place)) >= 0:
            found.append((block[place:end], start + end + 1))
            place = end + 1
        # a line without an end: its rest is left out
        if not found and len(block) - place >= LINE_BYTES + TOKEN_BYTES:
            found.append((block[place:], start + len(block)))
            place = len(block)
        self.cursor = start + place
        return self._lines(found)

    def news_after(self, cursor: int, *, count: int, most: int) -> list[Line]:
        """As `news`, from a byte that an earlier cursor named. Raises OSError."""
        with self.path.open("rb") as file:
            self.cursor = cursor if cursor <= os.fstat(file.fileno()).st_size else 0
            self._time = _time_before(file.fileno(), self.cursor)
        return self.news(count=count, most=most)

    def _lines(self, lines: Sequence[tuple[bytes, int]]) -> list[Line]:
        first = self._time or next((time for line, _ in lines if (time := _time_of(line))), "")
        made = []
        for line, end in lines:
            self._time = max(_time_of(line) or first, self._time)
            text = redacted(line[: LINE_BYTES + TOKEN_BYTES].decode(errors="replace"))[:LINE_BYTES]
            made.append(Line(self.member, self._time, text, end))
            if len(made) % PAUSE_LINES == 0:
                self._pause()
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


def _time_before(descriptor: int, place: int) -> str:
    """Of the last line before it that has one of its own; "": none is near."""
    start = max(0, place - BLOCK_BYTES)
    lines = os.pread(descriptor, place - start, start).split(b"\n")
    return next((time for line in reversed(lines) if (time := _time_of(line))), "")


def _end_of_lines(descriptor: int, size: int) -> int:
    """The byte after the last line that has ended; if that one is very far, a byte within the line after
    it."""
    position, stop = size, max(0, size - NEWS_BYTES)
    while position > stop:
        start = max(stop, position - BLOCK_BYTES)
        if (found := os.pread(descriptor, position - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        position = start
    return stop


def _backwards(descriptor: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines before byte `end`, the last one first, each with the place of its first byte. Of a long one
    the beginning."""
    rest, position, stop = b"", end, max(0, end - SCAN_BYTES)
    ended = False  # whether the end of the last line was passed: what follows it is no whole line
    while position > stop:
        start = max(stop, position - BLOCK_BYTES)
        block = os.pread(descriptor, position - start, start)
        upto, position = len(block), start
        while (found := block.rfind(b"\n", 0, upto)) >= 0:
            if ended:
                yield block[found + 1 : upto] + rest, start + found + 1
            rest, upto, ended = b"", found, True
        rest = (block[:upto] + rest)[: LINE_BYTES + TOKEN_BYTES] if ended else b""
    if ended and not stop:
        yield rest, 0
