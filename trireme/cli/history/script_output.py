"""What a script prints in trainers, on the terminal of `trireme run` while it goes on.

log files of trainers ─► what was written since ─► lines that are not ours ─► so many of each trainer ─► Display.output

The files keep everything. What a terminal could not show, or what would hide the progress, is counted and told.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import redacted

Shown = Sequence[tuple[str, str]]  # member and line

LOOK_S = 0.2
AT_ONCE = 100  # lines of one trainer; a traceback is whole
PER_SECOND = 20.0  # and then so many
TELL_S = 5.0  # how often a flood that goes on is told
BLOCK_BYTES = 1 << 20  # of one file at once
BEHIND_BYTES = 4 << 20  # what is further behind is left out without being read
LINE_CHARACTERS = 2000
LINE_BYTES = 64 << 10  # a longer line is cut
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def is_of_script(line: bytes) -> bool:
    """Whether our logger did not write it: ours are JSON objects with these names."""
    return not (
        line.startswith(b'{"') and all(name in line for name in (b'"event": ', b'"service": ', b'"timestamp": '))
    )


def shown(line: bytes) -> str:
    """As a terminal would leave it: of a progress bar the last state. Without what would move the cursor, without tokens."""
    text = line[:LINE_BYTES].decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    text = redacted(_CONTROL.sub("", text))
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"


class ScriptOutput:
    """Of the trainers whose logs lie in a folder. What the files already hold was shown by an earlier run."""

    def __init__(self, logs: Path, show: Callable[[Shown], None]) -> None:
        self._logs, self._show = logs, show
        self._files: dict[Path, _Output] = {path: _Output(path, _size(path)) for path in self._paths()}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look(clock.monotonic())
            await asyncio.sleep(LOOK_S)

    def look(self, now: float, *, last: bool = False) -> None:
        """Shows what is new. `last`: the trainers have ended."""
        lines = list[tuple[str, str]]()
        for path in self._paths():
            output = self._files.setdefault(path, _Output(path, 0))
            lines += [(path.stem, line) for line in output.news(now, last=last)]
        if lines:
            self._show(lines)

    def _paths(self) -> list[Path]:
        return sorted(self._logs.glob("trainer-*.log"))


class _Output:
    """Of one trainer. `place`: the byte from which it is read on."""

    def __init__(self, path: Path, place: int) -> None:
        self._path, self._place = path, place
        self._allowed, self._since = float(AT_ONCE), clock.monotonic()
        self._left_out, self._unread, self._told = 0, False, float("-inf")

    def news(self, now: float, *, last: bool) -> list[str]:
        self._allowed = min(float(AT_ONCE), self._allowed + max(0.0, now - self._since) * PER_SECOND)
        self._since = now
        lines = [shown(line) for line in self._taken(last=last)]
        # a flood that stopped is told at once, one that goes on now and then
        ended = last or self._allowed >= AT_ONCE
        if (self._left_out or self._unread) and (ended or now - self._told >= TELL_S):
            count = f"{'more than ' if self._unread else ''}{self._left_out:,} lines"
            lines.append(f"… {count} are left out here; all are in {self._path}")
            self._left_out, self._unread, self._told = 0, False, now
        return lines

    def _taken(self, *, last: bool) -> list[bytes]:
        found = list[bytes]()
        for line in self._read(last=last):
            if not is_of_script(line):
                continue
            if self._allowed >= 1:
                self._allowed -= 1
                found.append(line)
            else:
                self._left_out += 1
        return found

    def _read(self, *, last: bool) -> list[bytes]:
        """Whole lines. A file that was deleted or cannot be read has none."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._place:
                    self._place = 0
                if size - self._place > BEHIND_BYTES:
                    self._unread, self._place = True, size - BLOCK_BYTES
                    block = os.pread(file.fileno(), BLOCK_BYTES, self._place)
                    self._place += block.find(b"\n") + 1  # the rest of a line
                block = os.pread(file.fileno(), BEHIND_BYTES if last else BLOCK_BYTES, self._place)
        except OSError:
            return []
        end = block.rfind(b"\n") + 1
        if (last and end < len(block)) or len(block) - end > LINE_BYTES:  # a line without an end
            end = len(block)
        self._place += end
        return block[:end].removesuffix(b"\n").split(b"\n") if end else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
