"""Standard output and standard error of a process that must not wait for whoever reads them.

A terminal that was stopped (Ctrl-S) or a pipe that nobody reads takes no more than some kilobytes; the next
write waits, and so does everything that the writing thread has to do besides. A launcher would supervise
nothing meanwhile.

    print, rich, logs ──write──► at most WAITING_BYTES in memory ──a thread──► terminal, pipe
                         │                                          │
                         ├─ no room: left out, and told once        └─ nobody reads it any more:
                         │  there is some again                        what follows goes nowhere
                         └─ never waits, never raises

Files are written at once: they make nobody wait, and hold what a process said last. On a full disk lines are
left out and told in the same way.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import stat
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any, TextIO, cast

from trireme_shared.platform.runtime import clock

WAITING_BYTES = 256 << 10
AT_ONCE_BYTES = 4096  # a pipe takes these whole or not at all
END_S = 5.0  # at its end a process waits for a reader that takes something at least so often
ORDER_S = 0.05
STDOUT = 1
LEFT_OUT = "... {count:,} lines are left out here: {cause}\n"
UNREAD = "nobody read them in time"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Output:
    """A text stream over the descriptor of `stream`. Use it from one process only, and `drain` it at the end.
    `at_once`: it is a file."""

    def __init__(self, stream: TextIO, *, at_once: bool = False) -> None:
        stream.flush()
        self._stream, self._number, self._at_once = stream, stream.fileno(), at_once
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._bytes = self._left_out = self._written = 0
        self._cause = UNREAD
        self._gone = False  # nobody reads it any more
        self.stuck = False  # somebody has waited for its reader in vain, and it has taken nothing since
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Output {self._number}: {self._bytes} bytes wait{', nobody reads' if self._gone else ''}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def lost(self) -> str:
        """Why something was left out and not told yet; "": nothing was."""
        return self._cause if self._left_out else ""

    def write(self, text: str) -> int:
        if self._number == STDOUT:
            settle()
        with self._changed:
            if not self._gone:
                self._write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back that could be written."""

    def drain(self, quiet_s: float = END_S) -> None:
        """Wait until all is written, or nobody reads it any more, or the reader took nothing for
        `quiet_s`."""
        seen, since = -1, clock.monotonic()
        with self._changed:
            while self._bytes and not self._gone:
                if self._written != seen:
                    seen, since = self._written, clock.monotonic()
                left_s = since + quiet_s - clock.monotonic()
                if left_s <= 0:
                    self.stuck = True
                    return
                self._changed.wait(left_s)

    # ------------------------------------------------------------ inside

    def _write(self, text: str) -> None:
        content = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        if self._left_out:
            told = LEFT_OUT.format(count=self._left_out, cause=self._cause)
            content = told.encode() + content
        taken = self._put(content) if self._at_once else self._add(content)
        self._left_out = 0 if taken else self._left_out + text.count("\n")

    def _add(self, content: bytes) -> bool:
        """False: there is no room for it."""
        if self._bytes + len(content) > WAITING_BYTES:
            return False
        self._waiting.append(content)
        self._bytes += len(content)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="output", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return True

    def _write_on(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                content = self._waiting.popleft()
            for start in range(0, len(content), AT_ONCE_BYTES):
                piece = content[start : start + AT_ONCE_BYTES]
                written = self._put(piece)
                with self._changed:
                    if not (written or self._gone):
                        self._left_out += max(1, piece.count(b"\n"))
                    self._bytes = self._bytes - len(piece) if not self._gone else 0
                    self._written += len(piece)
                    self.stuck = False
                    self._changed.notify_all()
                    if self._gone:
                        self._waiting.clear()
                        return

    def _put(self, content: bytes) -> bool:
        """False: it is not written, or in part."""
        while content:
            try:
                content = content[os.write(self._number, content) :]
            except BlockingIOError:  # whoever gave it to us has made it so
                select.select([], [self._number], [])
            except OSError as error:
                self._cause, self._gone = str(error.strerror), error.errno not in FULL
                return False
        return True


class Unfailing:
    """A text stream whose writes never raise: a log on a full disk must not end what is logged. `is_open`:
    the last write has left its line without an end, as a progress bar does."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.is_open = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        if text:
            self.is_open = not text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def patient(*names: str) -> None:
    """From now on nothing that this process writes to these streams (without names: to both) makes it wait,
    and no reader's end is an error."""
    for name in names or ("stderr", "stdout"):
        stream = getattr(sys, name)
        if not isinstance(stream, Output) and (mode := _mode_of(stream)) is not None:
            setattr(sys, name, cast("TextIO", Output(stream, at_once=stat.S_ISREG(mode))))
    atexit.unregister(drain)
    atexit.register(drain)


def settle() -> None:
    """Before standard output is written: what was written to standard error stands before it on a terminal,
    if its reader takes it at once."""
    if isinstance(sys.stderr, Output) and not sys.stderr.stuck:
        sys.stderr.drain(ORDER_S)


def drain(quiet_s: float = END_S) -> None:
    """Also before a process ends without what is done at an ordinary end: see `Output.drain`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Output):
            stream.drain(quiet_s)
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _mode_of(stream: TextIO) -> int | None:
    """Of what lies behind it; None: it is no stream of the system, as in tests and notebooks."""
    try:
        return os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None


def open_missing() -> None:
    """A process that was started without standard output or error (`>&-`) writes them to nowhere. Otherwise
    the next file that it opens would get that number, and what others print."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
