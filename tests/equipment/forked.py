"""Python modules as processes that are forked from one which has imported what they need: 0.1 s of processor
time each, not 1 to 4 s.

    test ── fork server (trireme.launch.fork_server)
              ├── the process: a child of the test, with its own arguments, environment, working directory,
              │   output and exit code
              └── the fork server that it may ask for: forked as well, and waiting

Everything from the control socket on is what launchers do with members. What a test proves about the start of
an interpreter (its flags, its environment, what it imports first) needs a new one: `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Self

from trireme.launch import fork_server, processes
from trireme.launch.processes import PYTHON_MODULE, ForkServer, Process
from trireme.pool import local_pool
from trireme_shared.platform.runtime import process_setup
from trireme_shared.platform.runtime.process_setup import adopting, die_with, memory_tunables

MARK = "TEST_MARK"
"""A variable by which a test finds the processes that descend from it, also when they were forked:
/proc/PID/environ shows it."""
MARK_LENGTH = 32
SET_BY_LIBRARIES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)
LEFT_OUT = (
    "TRIREME_",
    "MLFLOW_",
    "_MLFLOW_",
)  # by their beginning: MLflow, and our tracker for it, set some in this process
READ_WHEN_USED = (MARK, "ETCD_BIN")
MODULE = "tests.equipment.forked"
START_S = 60.0
REQUEST_BYTES = 1 << 20
COMMANDS = "trireme.cli"
CLUSTER = ("trireme", "up")
AHEAD = (
    "httpcore",
    "trireme.client",
    "trireme.launch.cluster",
    "trireme.pool.host_agent",
    "trireme.pool.local_pool",
)
REPOSITORY = Path(__file__).resolve().parents[2]


def clean_environment() -> dict[str, str]:
    """Ours without LEFT_OUT, and without what pytest and imports (torch's compiler, scikit-learn, MLflow) set
    in this process."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LEFT_OUT) and name not in SET_BY_LIBRARIES
    }


class ForkedProcess:
    """A child of this process, with what tests use of subprocess.Popen. The end of `with` waits for it."""

    stdout: IO[str]
    stderr: IO[str]
    """Set by whoever wants to read files that it writes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return (
            f"<ForkedProcess {self.pid}: "
            f"{'running' if self.returncode is None else f'exit code {self.returncode}'}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative if a signal ended it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._descriptor)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written that was not read yet, after its end."""
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmServer:
    """The fork server of this process of `pytest -n`; it ends with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._environment = clean_environment()
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, processes.TITLE_ROOM],
                cwd=REPOSITORY,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=self._environment
                | memory_tunables(self._environment)
                | {"SPT_NOENV": "1", MARK: "0" * MARK_LENGTH},
                start_new_session=True,
            )

    def close(self) -> None:
        self._control.close()
        self._process.wait(START_S)

    def imports_as(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables would import the same: those that imports read are the
        server's."""
        return self._others(environment) == self._others(self._environment)

    @staticmethod
    def _others(environment: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in environment.items()
            if not name.startswith("TRIREME_") and name not in READ_WHEN_USED
        }

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        out: int,
        err: int,
    ) -> ForkedProcess:
        """`python -m module arguments` in that folder; `out` and `err` are descriptors."""
        title = " ".join(["python", "-m", module, *arguments])
        return self._fork(title, (str(folder), module, *arguments), environment, out, err)

    def start_server(self, control: socket.socket, environment: Mapping[str, str]) -> ForkedProcess:
        """As `processes.start_server`; what it forks is this process's as well."""
        with Path(os.devnull).open("wb") as nothing:
            return self._fork(fork_server.__name__, (), environment, control.fileno(), nothing.fileno())

    def _fork(
        self, title: str, arguments: tuple[str, ...], environment: Mapping[str, str], out: int, err: int
    ) -> ForkedProcess:
        request = fork_server.Request(
            MODULE,
            arguments,
            {process_setup.HASH_SEED: process_setup.DEFAULT_HASH_SEED, **environment},
            os.getpid(),
            title,
        )
        ours, theirs = socket.socketpair()
        with ours, self._lock, adopting():
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno(), out, err])
            ours.settimeout(START_S)
            ours.sendall(request.to_line())
            answer = ours.recv(processes.PID_BYTES)
            assert answer, "the fork server of the tests has ended"
            forked = ForkedProcess(int(answer))
            ours.sendall(fork_server.GO)
        return forked


@cache
def warm_server() -> WarmServer:
    server = WarmServer()
    atexit.register(server.close)
    return server


class Reserve:
    """A fork server that was forked before its launcher ran, while that had no threads, sockets and locks,
    and that waits until the launcher wants one. It ends with the launcher."""

    def __init__(self, path: Sequence[str]) -> None:
        """`path`: of its children."""
        self._to_it, its = socket.socketpair()
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            sys.path[:] = path
            self._to_it.close()
            with its:
                _wait_to_serve(its, launcher)
        its.close()

    def start_server(self, control: socket.socket, environment: Mapping[str, str]) -> object:
        """As `processes.start_server`, which starts the second one and all that follow."""
        with self._to_it:
            socket.send_fds(self._to_it, [json.dumps(dict(environment)).encode()], [control.fileno()])
        processes.start_server = START_SERVER
        return ForkedProcess(self._pid)


START_SERVER = processes.start_server


def _wait_to_serve(to_us: socket.socket, launcher: int) -> None:
    try:
        die_with(launcher)
        os.setsid()
        message, descriptors, _, _ = socket.recv_fds(to_us, REQUEST_BYTES, 1)
        if message:
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor, number in ((descriptors[0], 0), (nothing, 1), (nothing, 2)):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, nothing):
                os.close(descriptor)
            environment = json.loads(message)
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            _write_through()
            fork_server.main()
    finally:  # it holds no state, and what its launcher registered for an end is not its own
        signal.raise_signal(signal.SIGKILL)


def _write_through() -> None:
    """As PYTHONUNBUFFERED, which launchers set for members."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115  open as long as the process
        setattr(sys, name, type(before)(raw, before.encoding, before.errors, write_through=True))


def _show_mark(mark: str) -> None:
    """Write it where the kernel shows the environment with which this process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (
        int(fields[47]),
        int(fields[48]),
    )  # env_start and env_end: fields 50 and 51, the third is the first here
    place = ctypes.string_at(start, end - start).index(f"{MARK}=".encode()) + len(MARK) + 1
    assert len(mark) == MARK_LENGTH, mark
    ctypes.memmove(start + place, mark.encode(), MARK_LENGTH)


def _run(folder: str, module: str, *arguments: str) -> None:
    """In the forked process: become `python -m module arguments` in that folder; without one `python -P -m`,
    where it is."""
    _show_mark(os.environ.get(MARK, "0" * MARK_LENGTH))
    installed = sys.path[1:]  # the first is the repository
    spawns = (module, *arguments[:1]) == CLUSTER
    processes.start_server = Reserve(sys.path if spawns else installed).start_server
    if spawns:
        local_pool.spawn = partial(_forked, ForkServer())
    if folder:
        os.chdir(folder)
    sys.path[:] = [folder, *installed] if folder else installed
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _forked(
    forks: ForkServer, argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
) -> Awaitable[Process]:
    """As `processes.spawn`; what is started has a fork server in reserve as well."""
    own = len(PYTHON_MODULE)
    return forks.start([*argv[:own], MODULE, "", *argv[own:]], environment, out, err)


def _serve_on_output() -> int:
    """In the forked process: become a fork server. Its control socket came where others have their output."""
    os.dup2(1, 0)
    os.dup2(2, 1)
    del sys.path[0]  # -P
    _write_through()
    return fork_server.main()


def _serve() -> int:
    commands = pkgutil.walk_packages(importlib.import_module(COMMANDS).__path__, f"{COMMANDS}.")
    for name in (*(found.name for found in commands), *AHEAD):
        importlib.import_module(name)
    return fork_server.main()


if __name__ == "__main__":
    match sys.argv[1:]:
        case [processes.TITLE_ROOM]:
            sys.exit(_serve())
        case []:
            sys.exit(_serve_on_output())
        case words:
            _run(*words)
