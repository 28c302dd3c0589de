"""`python -m trireme.launch.fork_server`: imports what members need once (torch takes seconds) and forks
them.

    launcher ── fork server ── middle ── child
       `─────────────────────────────────'

    middle ends at once, so the child becomes the launcher's: the launcher waits for it, and it dies with the
    launcher.

The control socket is standard input: one byte with three descriptors (connection, stdout, stderr) for each
start; on the connection the launcher writes a Request, the child its pid, and the launcher GO. A side that
gets no answer gives up.

User code is imported in children only, and no thread is started here (OpenBLAS ends its own before a fork).
If this process is killed, its children keep running: they are the launcher's. If the launcher is killed, its
children die with it, and this process ends what they have started themselves (trireme/launch/leftovers.py).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Never, Self

import setproctitle

from trireme.launch import leftovers
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.process_setup import die_with

GO = b"!"
DESCRIPTORS = 3
REQUEST_BYTES = 4 << 20
ADOPTION_S = 5.0
FAILED = 1

# what each module imports anyway, in the order in which a job starts them
_SERVICE = ("uvloop", "pydantic_settings", "trireme_shared.platform.runtime.service")
_TRAINER = (*_SERVICE, "trainer_agent.settings", "trainer_agent.process")
NEEDS = {
    "trainer_agent": (*_TRAINER, "trainer_agent.script.inspect"),
    "master_service": (*_SERVICE, "uvicorn.loops.auto", "master_service.settings", "master_service.api.app"),
    "pserver_service": (
        *_SERVICE,
        "pserver_service.settings",
        "trireme_shared.serving.data_plane.server",
        "pserver_service.member",
    ),
    "trireme.pool.task_process": (
        "pydantic_settings",
        "trireme_shared.platform.membership.local_script",
        "trireme_shared.platform.membership.settings",
    ),
    "trireme.masterless": (*_TRAINER, "master_service.masterless.dispatcher", "trireme.config"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """`python -P -m module arguments` with this environment, as a child of `parent`; `title` is what `ps`
    shows."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    parent: int
    title: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        fields: dict[str, Any] = json.loads(line)
        return cls(**fields)


def main() -> int:
    """Serve until the launcher ends, which closes the control socket."""
    launcher = os.getppid()
    # OpenBLAS
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    # finds the space for titles, which is impossible after the environment has changed
    setproctitle.getproctitle()
    gc.disable()  # a collection would copy the pages that children share
    ahead = [name for names in NEEDS.values() for name in names]
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        while True:
            if ahead and not select.select([control], [], [], 0)[0]:
                _import(ahead.pop(0))
                continue
            request, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
            if not request:
                leftovers.end_session_without(launcher)
                return 0
            descriptor, out, err = descriptors
            # an error here: the launcher has given up or died
            with socket.socket(fileno=descriptor) as connection, suppress(OSError, ValueError):
                _start(Request.from_line(_line(connection)), connection, out, err)
            os.close(out)
            os.close(err)


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as lines:
        return lines.readline(REQUEST_BYTES)


def _import(name: str) -> None:
    with suppress(Exception):  # the module that needs it fails in its own log
        importlib.import_module(name)


def _start(request: Request, connection: socket.socket, out: int, err: int) -> None:
    for name in NEEDS.get(request.module, ()):
        _import(name)
    gc.freeze()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            _become(request, connection, out, err)
        os._exit(0)
    os.waitpid(middle, 0)


def _become(request: Request, connection: socket.socket, out: int, err: int) -> Never:
    """In the child: run the requested module and end."""
    code = FAILED
    try:
        # no session of its own: the kernel would let its loop wait for its compute thread, see
        # trireme_shared.platform.runtime.service
        os.setpgid(0, 0)
        deadline = clock.monotonic() + ADOPTION_S
        while os.getppid() != request.parent and clock.monotonic() < deadline:
            if select.select([connection], [], [], 0.001)[0]:
                os._exit(FAILED)  # whoever asked has ended: nothing comes before the number below is sent
        die_with(request.parent)
        connection.sendall(str(os.getpid()).encode())
        if connection.recv(len(GO)) != GO:
            os._exit(FAILED)
        connection.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request.environment)
        tempfile.tempdir = None  # what is imported here may have asked for it
        setproctitle.setproctitle(request.title)
        if "numpy" in sys.modules:  # Python reseeds its own generator; torch's starts the same everywhere
            importlib.import_module("numpy.random").seed()
        code = run(request)
    finally:
        os._exit(code)


def run(request: Request) -> int:
    """Run its module here, as `python -m` does; returns the exit code. Does what an interpreter does at its
    end, without the teardown of modules (0.5 s with torch)."""
    sys.argv = [request.module, *request.arguments]
    gc.enable()
    code = FAILED
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
    # as multiprocessing does: joins threads that are no daemons
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def _exit_code(value: object) -> int:
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    print(value, file=sys.stderr)  # noqa: T201  as an interpreter does
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
