"""How the launcher starts Python processes: forked from a fork server that has imported torch already, or spawned.

    ForkServer.start ─► forked        saves tenths of a second of processor time, and shares memory
                  `──► spawned        if forking is impossible, switched off, or failed

Both are children of this process, lead a session of their own and die with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, Protocol, Self

from trireme.launch.fork_server import GO, Request
from trireme_shared.platform.runtime import process_setup, telemetry
from trireme_shared.platform.runtime.process_setup import adopting, die_with_parent, memory_tunables
from trireme_shared.protocol.errors import PeerError, TriremeError

PYTHON_MODULE = (sys.executable, "-P", "-m")  # -P: the user's working directory must not shadow our packages
MODULE = "trireme.launch.fork_server"
TITLE_ROOM = "." * 80  # a child's title can be as long as this command line
START_TIMEOUT_S = 60.0  # imports included
ATTEMPTS = 2  # a fork server that died is replaced once
PID_BYTES = 32
UNKNOWN_CODE = 255  # what asyncio uses

log = telemetry.logger("processes")


class Process(Protocol):
    """What is common to asyncio's Process and Forked."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...


def inherited_environment() -> dict[str, str]:
    """Our environment for children, without TRIREME_* (those settings are in the spec), with the malloc tunables and a fixed hash seed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    return (
        clean
        | {"PYTHONUNBUFFERED": "1", process_setup.HASH_SEED: process_setup.hash_seed(clean)}
        | memory_tunables(clean)
    )


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes], IO[bytes]], Awaitable[Process]]


async def spawn(argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


class Forked:
    """A child of this process that the fork server forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._end)

    def __repr__(self) -> str:
        return f"<Forked {self.pid}: {'running' if self.returncode is None else f'exit code {self.returncode}'}>"

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # other code in this process has waited for it
            self.returncode = UNKNOWN_CODE
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int, /) -> None:
        if self.returncode is None:  # it was not waited for yet, so no other process can have its pid
            os.kill(self.pid, signal)


def start_server(control: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A fork server that reads requests from `control` and dies with this process."""
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [*PYTHON_MODULE, MODULE, TITLE_ROOM],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "SPT_NOENV": "1"},  # so that setproctitle leaves /proc/PID/environ alone
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509  as for all children
    )


class ForkServer:
    """Started when it is first needed. The end of `with` stops it; its children keep running. TRIREME_START=spawn: never started."""

    def __init__(self) -> None:
        self._wanted = hasattr(os, "pidfd_open") and os.environ.get("TRIREME_START") != "spawn"
        self._environment = inherited_environment()
        self.server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<ForkServer: {f'pid {self.pid}' if self.server else 'not running'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """0 if there is none."""
        return self.server.pid if self.server else 0

    def prepare(self) -> None:
        """Start the server now, so that it has done its imports when the first child is wanted."""
        if self._wanted:
            self._running()

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> Process:
        """Start `argv`; raises OSError as asyncio.create_subprocess_exec does."""
        for _ in range(ATTEMPTS):
            if not (self._wanted and tuple(argv[:3]) == PYTHON_MODULE and self._is_like_ours(environment)):
                break
            try:
                return await self._fork(argv, environment, out, err)
            except (OSError, TimeoutError, TriremeError) as error:
                log.warning("fork_failed", server=self.pid, cause=f"{type(error).__name__}: {error}")
                self._stop()
        else:
            self._wanted = False
        return await spawn(argv, environment, out, err)

    def _is_like_ours(self, environment: Mapping[str, str]) -> bool:
        """The server did its imports with our environment, so only children with the same one may be forked."""
        others = {name: value for name, value in environment.items() if not name.startswith("TRIREME_")}
        return others == self._environment

    async def _fork(
        self, argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> Forked:
        name = environment.get("TRIREME_NAME")
        title = " ".join([*argv, f"[{name}]"] if name else argv)
        request = Request(argv[3], tuple(argv[4:]), dict(environment), os.getpid(), title)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._running(), [b"+"], [theirs.fileno(), out.fileno(), err.fileno()])
            with adopting():
                async with asyncio.timeout(START_TIMEOUT_S):
                    await loop.sock_sendall(ours, request.to_line())
                    answer = await loop.sock_recv(ours, PID_BYTES)
                if not answer:
                    raise PeerError(f"{self!r} or its child ended before it sent its pid")
                forked = Forked(int(answer))
            ours.send(GO)
        return forked

    def _running(self) -> socket.socket:
        """The control socket of the server; starts the server if there is none."""
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self.server = start_server(theirs, self._environment)
        return self._control

    def _stop(self) -> None:
        """SIGKILL: it holds no state."""
        if self._control is not None:
            self._control.close()
        if self.server is not None:
            self.server.send_signal(signal.SIGKILL)
            self.server.wait()
        self._control = self.server = None
