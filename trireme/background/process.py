"""The process of a background run: `trireme run` without a terminal, asked for by a line of JSON on stdin,
told about on stdout.

It dies with the process that started it, even if that one is killed; its members die with it. SIGTERM is
Ctrl-C. Each line on stdout is a message, a JSON object of one key:

begun       {"job", "folder"}: everything was checked, and members are being started
progress    the fields of Progress
event       a sentence
output      [[member, line], ...] that members' scripts printed
ended       {"code", "result"} of a job that has ended | {"error"} | {"failure"} of the script | {"stopped":
            true}; the last message
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from trireme.background.errors import in_python
from trireme.cli.run import RunRequest, run_job
from trireme.preflight import ScriptError, check_path
from trireme.view.progress import Progress
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.process_setup import die_with
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import JobSpec

MOST_WAITING = 5000  # messages that the parent has not read
WRITTEN_S = 10.0


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if sys.platform == "linux":
        die_with(asked["parent"])
    stream = os.fdopen(
        os.dup(1), "wb"
    )  # whatever else prints writes to stderr, where the parent looks if this process dies
    os.dup2(2, 1)
    messages = Messages(stream)
    messages.send("ended", run(asked, messages))
    messages.close()
    os._exit(0)  # the teardown of modules takes tenths of a second


def run(asked: dict[str, Any], messages: Messages) -> dict[str, Any]:
    """The last message. `asked`: the arguments of RunRequest."""
    shown = [True]

    class Display(MessageDisplay):
        def close(self) -> None:
            shown[0] = False  # why the job failed is in its result

    def tell(line: str) -> None:
        if shown[0]:
            messages.send("event", in_python(line))

    request = RunRequest(
        Path(asked["script"]),
        asked["settings"],
        check=asked["check"],
        fresh=asked["fresh"],
        accept_changes=asked["accept_changes"],
        insecure=asked["insecure"],
        as_json=True,
        spelling="{}",
        again=asked["again"],
        open_display=lambda spec, folder: Display(messages, spec, folder),
    )
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(Lines(tell)):
        telemetry.configure(level="ERROR", json=False)
        try:
            check_path(request.script)
            code = asyncio.run(run_job(request))
        except ScriptError as error:
            return {"failure": error.failure.model_dump()}
        except TriremeError as error:
            return {"error": error.to_map()}
        except asyncio.CancelledError:
            return {"stopped": True}
    return {"code": code, "result": json.loads(printed.getvalue().splitlines()[-1])}


class Messages:
    """A thread of its own writes them: a parent that does not read (a notebook in a long computation) must
    not stop the run. What is too much for it is left out, the end is not. `close` waits for the last ones."""

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


if __name__ == "__main__":
    main()
