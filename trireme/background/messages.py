"""How the process of a background run tells its parent what happens: objects of one key, one JSON line each.

begun       {"job", "folder"}: everything was checked, and members are being started
progress    the fields of Progress
event       a sentence
output      [[member, line], ...] that members' scripts printed
ended       {"code", "result"} of a job that has ended | {"error"} | {"failure"} of the script | {"stopped": true}; the last message
"""

from __future__ import annotations

import io
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from trireme.background.errors import in_python
from trireme.view.progress import Progress
from trireme_shared.protocol.records import JobSpec

MOST_WAITING = 5000  # messages that the parent has not read
WRITTEN_S = 10.0


class Messages:
    """A thread of its own writes them: a parent that does not read (a notebook in a long computation) must not stop the run. What is too
    much for it is left out, the end is not. `close` waits for the last ones."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="messages", daemon=True)
        self._thread.start()

    def send(self, kind: str, value: Any) -> None:
        with self._changed:
            if kind == "progress" and self._waiting and self._waiting[-1][0] == kind:
                self._waiting.pop()
            if len(self._waiting) < MOST_WAITING or kind == "ended":
                self._waiting.append((kind, value))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(WRITTEN_S)

    def _write(self) -> None:
        with suppress(OSError):  # the parent has closed its end
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    if not self._waiting:
                        return
                    kind, value = self._waiting.popleft()
                self._file.write(json.dumps({kind: value}).encode() + b"\n")
                self._file.flush()


class MessageDisplay:
    """A Display (trireme.view.progress) that sends what it gets."""

    def __init__(self, messages: Messages, spec: JobSpec, folder: Path) -> None:
        self._messages = messages
        messages.send("begun", {"job": spec.job, "folder": str(folder)})

    def show(self, progress: Progress, now: float) -> None:
        del now
        self._messages.send("progress", asdict(progress))

    def event(self, sentence: str) -> None:
        self._messages.send("event", in_python(sentence))

    def output(self, lines: Sequence[tuple[str, str]]) -> None:
        self._messages.send("output", [list(line) for line in lines])

    def close(self) -> None:
        return


class Lines(io.TextIOBase):
    """A text stream that gives whole lines to `tell`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._begun = tell, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._tell(line)
        return len(text)
