"""What a process is at work on, kept in a file that outlives it: whoever comes after it learns at what it
died.

    with journal.at(b"task 7, minibatch 3"):   two stores into a mapped file, no system call; a SIGKILL leaves
        user code                              them there
    left_by(path) ─► Left(process, works, pardoned)
                                               read by the supervisor when the process has ended, and by its
                                               successor

A process that ends in order leaves nothing begun. One that is told to stop, or that its supervisor ends
because it was frozen, is pardoned: its end says nothing of its work.

    process name (256 bytes) │ pardoned (1) │ SLOTS times [state (1) │ work (SLOT_BYTES - 1)]
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from trireme_shared.platform.runtime import clock, telemetry

FILE = "TRIREME_BEGUN_FILE"
LAST_END = "TRIREME_LAST_END"
SLOTS, SLOT_BYTES = 8, 512
WORK_BYTES = SLOT_BYTES - 1
IDLE, BEGUN, OVER_TIME = 0, 1, 2
HUNG = 70  # exit code of a process whose work has hung
LOOKS, LEAST_LOOK_S, MOST_LOOK_S = 10, 0.1, 5.0
_NAME_BYTES = 256
_PARDONED = _NAME_BYTES
_FIRST = _NAME_BYTES + 1
_SIZE = _FIRST + SLOTS * SLOT_BYTES
_NAMESAKES = 64

log = telemetry.logger("begun")


@dataclass(frozen=True, slots=True)
class Left:
    """What a process that has ended had begun. `process`: as it called itself; `works`: as given to `at`;
    `hung`: it ended itself, because they took too long."""

    process: str
    works: tuple[bytes, ...]
    hung: bool = False


def left_by(path: Path) -> Left | None:
    """None if the process ended in order, was pardoned, or there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return _left(content)


def _left(content: bytes) -> Left | None:
    if len(content) != _SIZE or content[_PARDONED]:
        return None
    slots = [content[start : start + SLOT_BYTES] for start in range(_FIRST, _SIZE, SLOT_BYTES)]
    begun = [slot for slot in slots if slot[0] in (BEGUN, OVER_TIME)]
    if not begun:
        return None
    works = tuple(dict.fromkeys(slot[1:].rstrip(b"\0") for slot in begun))
    name = content[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    return Left(name, works, any(slot[0] == OVER_TIME for slot in begun))


def pardon(path: Path) -> None:
    """The process of that file was ended from outside: what it had begun is not to blame."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.seek(_PARDONED)
        file.write(b"\1")


class Journal:
    """Of this process. `left`: what the process before it had begun, until `begin` is called. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises OSError. Of several living processes with this path, the later ones take names beside it."""
        self.path, self._file = _own_file(path)
        if os.fstat(self._file).st_size != _SIZE:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, bytes(_SIZE), 0)  # a store into a hole of a full disk would be a SIGBUS
        self._memory = mmap.mmap(self._file, _SIZE)
        self.left = _left(self._memory[:])
        self._free = list(range(_FIRST, _SIZE, SLOT_BYTES))
        self._numbers = count(1)
        self._busy: dict[int, int] = {}  # slot -> the number of its work
        self._rested: dict[int, float] = {}  # slot -> when its last work ended or waited
        self._of_thread = threading.local()
        self._watching: threading.Thread | None = None
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"<Journal {self.path}: {len(self._busy)} begun>"

    def begin(self, process: str) -> None:
        """From now on the file is about this process; what was left is forgotten."""
        self._memory[:] = process.encode()[:_NAME_BYTES].ljust(_SIZE, b"\0")
        self.left = None

    @contextlib.contextmanager
    def at(self, work: bytes) -> Iterator[None]:
        """In this block the calling thread is at `work`, of which WORK_BYTES are kept."""
        try:
            slot = self._free.pop()
        except IndexError:  # more threads than slots: not on record
            yield
            return
        self._memory[slot + 1 : slot + SLOT_BYTES] = work[:WORK_BYTES].ljust(WORK_BYTES, b"\0")
        self._go_on(slot)
        self._of_thread.slot = slot
        try:
            yield
        finally:
            self._of_thread.slot = None
            self._rest(slot)
            self._free.append(slot)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the calling thread waits for another process, in the middle of its work: if this
        process ends now, or this takes long, its work is not to blame."""
        slot = getattr(self._of_thread, "slot", None)
        if slot is None:
            yield
            return
        self._rest(slot)
        try:
            yield
        finally:
            self._go_on(slot)

    def _go_on(self, slot: int) -> None:
        self._busy[slot] = next(self._numbers)
        self._memory[slot] = BEGUN

    def _rest(self, slot: int) -> None:
        self._memory[slot] = IDLE
        self._busy.pop(slot, None)
        self._rested[slot] = clock.monotonic()

    def overlapping(self, seconds: float) -> tuple[bytes, ...]:
        """The works that some thread was at in the last `seconds`, also those that have ended since; of each
        slot the last one."""
        since = clock.monotonic() - seconds
        slots = [
            *self._busy,
            *(slot for slot, at in list(self._rested.items()) if at >= since and slot not in self._busy),
        ]
        return tuple(
            dict.fromkeys(self._memory[slot + 1 : slot + SLOT_BYTES].rstrip(b"\0") for slot in slots)
        )

    def pardon(self) -> None:
        """This process was told to stop: its end says nothing of its work."""
        self._memory[_PARDONED] = 1

    def watch(self, limit_s: float) -> None:
        """End this process once one work has taken longer than `limit_s`, also if it keeps the interpreter.
        The tracebacks of all threads go to standard error. Time in which the process was frozen does not
        count."""
        look_s = min(MOST_LOOK_S, max(LEAST_LOOK_S, limit_s / LOOKS))
        arm = partial(faulthandler.dump_traceback_later, limit_s + 2 * look_s, exit=True)
        arm()  # before any work begins: it may keep the interpreter at once
        self._watching = threading.Thread(
            target=self._watch, args=(limit_s, look_s, arm), name="begun", daemon=True
        )
        self._watching.start()

    def close(self) -> None:
        """This process ends in order: the file is deleted, unless some thread is still at work."""
        self._closed.set()
        if self._watching is not None:
            self._watching.join()
            faulthandler.cancel_dump_traceback_later()
        if not self._busy:
            self.path.unlink(missing_ok=True)
        self._memory.close()
        os.close(self._file)

    def _watch(self, limit_s: float, look_s: float, arm: Callable[[], None]) -> None:
        """`arm`: lets a thread of C, which needs no interpreter, end the process later, if this thread cannot
        run by then."""
        spent: dict[tuple[int, int], float] = {}  # by slot and number
        before = clock.monotonic()
        while not self._closed.wait(look_s):
            arm()
            now = clock.monotonic()
            elapsed_s, before = now - before, now
            counted_s = min(elapsed_s, 2 * look_s)
            spent = {begun: spent.get(begun, 0.0) + counted_s for begun in list(self._busy.items())}
            for (slot, _), seconds in spent.items():
                if seconds > limit_s:
                    self._end_hung(slot, seconds)

    def _end_hung(self, slot: int, seconds: float) -> None:
        self._memory[slot] = OVER_TIME
        work = self._memory[slot + 1 : slot + SLOT_BYTES].rstrip(b"\0").decode(errors="replace")
        log.error("hung", seconds=round(seconds), work=work)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        os._exit(HUNG)


def _own_file(path: Path) -> tuple[Path, int]:
    """Opened, and locked as long as this process lives. The locks of POSIX do not go to children, which may
    live on."""
    for number in range(_NAMESAKES):
        chosen = path.with_name(f"{path.name}.{number}") if number else path
        descriptor = os.open(chosen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise OSError(f"{chosen} belongs to another user")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return chosen, descriptor
    raise OSError(f"{_NAMESAKES} processes use {path} already")


_journal: Journal | None = None


def open_journal(path: Path) -> Journal:
    """The journal of this process, in which `at` writes from now on. Raises OSError."""
    global _journal  # noqa: PLW0603  it is about the whole process, as its log is
    _journal = Journal(path)
    return _journal


def close_journal() -> None:
    """See Journal.close."""
    global _journal  # noqa: PLW0603
    if _journal is not None:
        _journal.close()
    _journal = None


def at(work: bytes) -> contextlib.AbstractContextManager[None]:
    """See Journal.at; where this process keeps no journal, nothing."""
    return contextlib.nullcontext() if _journal is None else _journal.at(work)


def overlapping(seconds: float) -> tuple[bytes, ...]:
    """See Journal.overlapping; where this process keeps no journal, nothing."""
    return () if _journal is None else _journal.overlapping(seconds)


def waiting() -> contextlib.AbstractContextManager[None]:
    """See Journal.waiting; where this process keeps no journal, nothing."""
    return contextlib.nullcontext() if _journal is None else _journal.waiting()
