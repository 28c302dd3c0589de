"""What every service process does the same way: signals, uvloop, reports of errors that end it.

start -> main(stopping) -> ready(), settled() ... SIGTERM/SIGINT -> stopping is set
                            -> main drains and returns its exit code
                            -> not over after `drain_s` -> cancelled
                            -> a second signal -> exit at once
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import platform
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from trireme_shared.platform.runtime import output, telemetry
from trireme_shared.protocol.errors import TriremeError, leaves

DRAIN_SECONDS = 20.0
# enough for every reader, and small enough for programs that close all numbers up to the limit
OPEN_FILES = 1 << 16
LAST_WORDS_S = 0.5  # of a process that ends at once, for whoever reads them
LEASE_LOST, INTERRUPTED = 75, 130  # exit codes; 75: the process lost its place in the job, start it again
EXIT_CODES = {"SCRIPT_CHANGED": 76}  # of errors by which a launcher can tell the user what to do
READY_FILE = "TRIREME_READY_FILE"

log = telemetry.logger("service")


def run(main: Callable[[asyncio.Event], Awaitable[int]], drain_s: float = DRAIN_SECONDS) -> int:
    """Run a service to its end and return the process exit code. A TriremeError is logged as one line."""
    telemetry.unfailing_output()
    allow_open_files()
    serve_soon()
    try:
        import uvloop  # noqa: PLC0415  not on every platform

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_guarded(main, drain_s))


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one, at most OPEN_FILES. Processes that it
    starts inherit that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> tuple[int, int]:
    """How many files (sockets too) this process has open, and how many it may have. On systems without /proc
    the first one is 0: not known."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        found = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # that of the listing itself
    except OSError:
        found = 0
    return found, OPEN_FILES if most == resource.RLIM_INFINITY else most


def ready(url: str = "") -> None:
    """Call it once start-up can no longer fail. Tells the launcher, if one has set TRIREME_READY_FILE: it
    creates that file, with the process and the address (`url`) at which that answers for its health."""
    if path := os.environ.get(READY_FILE):
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(f"{os.getpid()} {url}\n")


def health_url(ready_file: Path, pid: int) -> str:
    """What process `pid` has said there; "": nothing yet."""
    try:
        said, _, url = ready_file.read_text(encoding="utf-8").strip().partition(" ")
    except FileNotFoundError:
        return ""
    return url if said == str(pid) else ""


def settled() -> None:
    """Call it after start-up: objects made so far stay alive, and a garbage collection of them would block
    the loop for 0.1 s."""
    gc.freeze()


async def _guarded(main: Callable[[asyncio.Event], Awaitable[int]], drain_s: float) -> int:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    work = asyncio.ensure_future(main(stopping))

    def on_signal(name: str) -> None:
        if stopping.is_set():
            log.info("stopped_at_once", signal=name)
            output.drain(LAST_WORDS_S)
            os._exit(INTERRUPTED)  # a normal exit would wait for threads that compute or write
        log.info("stopping", signal=name)
        stopping.set()
        loop.call_later(drain_s, work.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        return await work
    except asyncio.CancelledError:
        return INTERRUPTED
    except TriremeError as error:
        _report(error)
        return EXIT_CODES.get(error.code, 1)
    except ExceptionGroup as group:
        expected, rest = group.split(TriremeError)
        if rest is not None or expected is None:
            raise
        for leaf in leaves(expected):
            _report(leaf)
        return 1


def _report(error: TriremeError) -> None:
    log.error("stopped_by_error", code=error.code, message=error.message, hint=error.hint)


SLICE_NS = 100_000  # the shortest possible; the default is 0.7 to 3 ms
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
    """struct sched_attr of its first version; man 2 sched_setattr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def serve_soon() -> None:
    """Request short slices for the calling thread; threads and processes that it starts get the kernel's
    default. Does nothing if the kernel does not support them, or if the thread already has a scheduling
    policy or priority of its own.

    A loop wakes often and works little. Linux (6.12 and later) runs a thread with short slices sooner, but
    not for longer: when it wakes it preempts threads with longer slices, and it is preempted sooner itself.
    This holds between threads of one scheduling group; a session (autogroup) or a container is one group, so
    a loop in another group still waits for its turn.
    """
    number = SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # threads that it starts would not inherit it
        return
    request = _Attributes(size=ctypes.sizeof(_Attributes), flags=RESET_ON_FORK, nice=nice, runtime=SLICE_NS)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(request), 0)
