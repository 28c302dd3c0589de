"""Where a command writes its answer. A reader that has seen enough (`| head`) ends the command quietly, an
answer that cannot be written is an error, and what was closed before the command began (`>&-`) is nowhere.

This module loads nothing that takes time: it is needed before any command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from trireme_shared.platform.runtime import output
from trireme_shared.platform.runtime.output import Output

if TYPE_CHECKING:
    from io import TextIOWrapper

Code = str | int | None  # of sys.exit
OK, FAILED = 0, 1


class Answer:
    """Standard output. Its reader's end is the end of the command: SystemExit with OK."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        output.settle()
        with _ending():
            return self._stream.write(text)

    def flush(self) -> None:
        with _ending():
            self._stream.flush()


def begin() -> None:
    """Call it before a command does anything. What it says on standard error never ends it."""
    output.open_missing()
    output.patient("stderr")
    with suppress(AttributeError, ValueError):  # LC_ALL=C: what it lacks is shown by number, and is no error
        cast("TextIOWrapper", sys.stdout).reconfigure(errors="backslashreplace")
    sys.stdout = cast("TextIO", Answer(sys.stdout))


def end(code: Code) -> Code:
    """The exit code of a command whose answer is written now; `code`: as it would be without that."""
    if isinstance(sys.stdout, Output):
        output.drain()
        return _told(sys.stdout.lost, code) if sys.stdout.lost else code
    try:
        sys.stdout.flush()
    except SystemExit as ended:
        code = code or ended.code
    output.drain()
    return code


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _forget()
        raise SystemExit(OK) from None
    except OSError as error:
        _forget()
        raise SystemExit(_told(str(error.strerror), OK)) from None


def _told(cause: str, code: Code) -> Code:
    sys.stderr.write(f"error: standard output cannot be written: {cause}\n")
    return code or FAILED


def _forget() -> None:
    """What Python still holds goes nowhere."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
