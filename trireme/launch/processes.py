"""Python processes of a launcher: how they start, live and end, and when a dead one is started again. None
outlives the launcher.

    ForkServer.start ─► forked        saves tenths of a second of processor time, and shares memory
                  `──► spawned        if forking is impossible, switched off, or failed

Both are children of this process, lead a group of their own (a Ctrl-C in the terminal reaches the launcher
only) and die with it: PDEATHSIG kills them if the launcher itself is killed. What a child leaves running in
its group ends with it, whatever its end was (trireme/launch/leftovers.py). A Child is started, ends, and may
be started again, with the same log file.

A child that was killed or told to stop from outside (SIGKILL, SIGTERM: preemption, chaos) is always started
again. So is one that had started up and later lost its lease: its host froze or was cut off; and one that
found another script than the job's: somebody edits it, and the others train on. A child that the kernel
kills for lack of memory (out_of_memory.py in platform/runtime) has ended by itself. A child that ends by
itself right after its start MAX_EARLY_ENDS times is given up: one more start would not help. A child that
was never ready is given up after MAX_FAILED_STARTS such ends: it cannot start here (a missing package, say).
A job's restart_policy and restart_delay_s say otherwise for its trainers and parameter servers: fewer
starts, and later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol, Self

from trireme.launch import leftovers
from trireme.launch.fork_server import GO, Request
from trireme.view.child_events import AS_ASKED, ChildEvent
from trireme_shared.platform.etcd import Etcd, Get
from trireme_shared.platform.etcd.client import TIMEOUT_S
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import begun, clock, process_setup, telemetry
from trireme_shared.platform.runtime.containment import backoff_s
from trireme_shared.platform.runtime.http import is_here
from trireme_shared.platform.runtime.out_of_memory import memory_kills
from trireme_shared.platform.runtime.process_setup import adopting, die_with_parent, memory_tunables
from trireme_shared.platform.runtime.service import EXIT_CODES, LEASE_LOST, READY_FILE, health_url
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, MasterLock, PserverMember, TrainerMember
from trireme_shared.protocol.records.job_choices import RestartPolicy as Kind
from trireme_shared.protocol.records.tasks import BegunWork

PYTHON_MODULE = (sys.executable, "-P", "-m")  # -P: the user's working directory must not shadow our packages
MODULE = "trireme.launch.fork_server"
TITLE_ROOM = "." * 80  # a child's title can be as long as this command line
START_TIMEOUT_S = 60.0  # imports included
ATTEMPTS = 2  # a fork server that died is replaced once
PID_BYTES = 32
UNKNOWN_CODE = 255  # what asyncio uses
TAIL_BYTES = 16 << 10
TAIL_LINES = 15
EARLY_S = 30.0
MAX_EARLY_ENDS = 5
MAX_FAILED_STARTS = 2
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 3.0
# 0: it was told to stop
_FROM_OUTSIDE = {0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
SCRIPT_CHANGED = EXIT_CODES["SCRIPT_CHANGED"]

log = telemetry.logger("processes")
REVOKE_TIMEOUT_S = 2.0


class Process(Protocol):
    """What is common to asyncio's Process and Forked."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...


def inherited_environment() -> dict[str, str]:
    """Our environment for children, without TRIREME_* (those settings are in the spec), with the malloc
    tunables and a fixed hash seed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    return (
        clean
        | {"PYTHONUNBUFFERED": "1", process_setup.HASH_SEED: process_setup.hash_seed(clean)}
        | memory_tunables(clean)
    )


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes], IO[bytes]], Awaitable[Process]]


async def spawn(
    argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
) -> Process:
    """Raises OSError. Where there are no descriptors of processes (they are Linux's), what the child leaves
    running is not ended."""
    if hasattr(os, "pidfd_open"):
        return Spawned(_popen(argv, environment, out, err))
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def _popen(
    argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Returns when the program has begun, as asyncio's own way does. Raises OSError."""
    return subprocess.Popen(  # noqa: S603  our own interpreter and modules
        argv,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509  as for all children
    )


class Forked:
    """A child of this process that leads a group: the fork server forked it. It has ended once its group has:
    see trireme/launch/leftovers.py."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code: int | None = None  # of the process, which was waited for; its group may go on
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._end)

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"exit code {self.returncode}"
        return f"<{type(self).__name__} {self.pid}: {state}>"

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            self._code = self._reap()
        except ChildProcessError:  # other code in this process has waited for it
            self._code = UNKNOWN_CODE
        self._end_group(self._code, signal.SIGTERM, signal.SIGKILL)

    def _end_group(self, code: int, *signals: signal.Signals, limit: float = 0.0) -> None:
        """Send the first of these signals to what is left, and the next one after LEAVE_S; then tell the
        end."""
        if leftovers.left_of_group(self.pid):
            now = clock.monotonic()
            if now >= limit and signals:
                leftovers.signal_group(self.pid, signals[0])
                signals, limit = signals[1:], now + leftovers.LEAVE_S
            if now < limit:
                look = partial(self._end_group, code, *signals, limit=limit)
                self._loop.call_later(leftovers.LOOK_S, look)
                return
            log.warning("left_running", leader=self.pid, processes=leftovers.left_of_group(self.pid))
        self.returncode = code
        self._ended.set_result(code)

    def _reap(self) -> int:
        """Raises ChildProcessError."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int, /) -> None:
        if self._code is None:  # it was not waited for yet, so no other process can have its pid
            os.kill(self.pid, signal)


class Spawned(Forked):
    """As Forked, of a new interpreter."""

    def __init__(self, started: subprocess.Popen[bytes]) -> None:
        super().__init__(started.pid)
        self._started = started

    def _reap(self) -> int:
        return self._started.wait()  # without it Popen itself would wait for the number, some day


def start_server(control: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A fork server that reads requests from `control`, and ends once this process has closed the other
    end."""
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [*PYTHON_MODULE, MODULE, TITLE_ROOM],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "SPT_NOENV": "1"},  # so that setproctitle leaves /proc/PID/environ alone
        start_new_session=True,
    )


class ForkServer:
    """Started when it is first needed. The end of `with` stops it; its children keep running.
    TRIREME_START=spawn: never started."""

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
        """The server did its imports with our environment, so only children with the same one may be
        forked."""
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
        """SIGKILL: it holds no state. Before it sees the end of the connection, so that it does not look for
        an end of this process."""
        if self.server is not None:
            self.server.send_signal(signal.SIGKILL)
            self.server.wait()
        if self._control is not None:
            self._control.close()
        self._control = self.server = None


class ClusterError(TriremeError):
    """The cluster cannot go on: a child ends again and again. `details`: child, log, tail."""

    code = "CLUSTER_FAILED"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `code`: as subprocess gives it (negative: the signal's number). `out_of_memory`:
    the kernel has killed it for that, as text."""

    pid: int
    code: int
    lived_s: float
    out_of_memory: str = ""

    def __str__(self) -> str:
        if self.out_of_memory:
            return self.out_of_memory
        if self.code == SCRIPT_CHANGED:
            return (
                "its script or a module has changed since the job was created: restore it, or stop the "
                "job and start it again"
            )
        return signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"


class Child:
    """A process that can be started again after its end; `starts` counts the starts. `group`: signals go to
    all processes of the group that it leads."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        start: Start = spawn,
        *,
        group: bool = False,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.environment = dict(environment)
        self.log = log
        self.starts = 0
        self._start, self._group = start, group
        self.process: Process | None = None
        self._since = 0.0
        self._last_end: Exit | None = None
        self._ended: Process | None = None  # how, is `_last_end`
        self._killed_here = False

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.alive else "not running"
        return f"<Child {self.name}: {state}, started {self.starts} times>"

    @property
    def pid(self) -> int:
        """0 if it was never started."""
        return self.process.pid if self.process else 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def was_ready(self) -> bool:
        """Whether one of its processes has created the file that READY_FILE names; members do once they have
        started up."""
        return Path(self.environment.get(READY_FILE, "")).is_file()

    @property
    def health_url(self) -> str:
        """Where its present process answers for its health; "": it has not said so yet."""
        return health_url(Path(self.environment.get(READY_FILE, "")), self.pid)

    @property
    def left(self) -> begun.Left | None:
        """What its process had begun when it ended; None: nothing, or it keeps no record of that."""
        return begun.left_by(Path(self.environment[begun.FILE])) if begun.FILE in self.environment else None

    def pardon(self) -> None:
        """Its process was ended from outside, whatever it had begun."""
        if begun.FILE in self.environment:
            begun.pardon(Path(self.environment[begun.FILE]))

    async def start(self) -> None:
        """Start the process; its output is appended to `log`."""
        assert not self.alive, f"{self!r} is started twice"
        memory_kills().look()  # those until now are not of this process
        self._killed_here = False
        last_end = {begun.LAST_END: str(self._last_end)} if self._last_end is not None else {}
        with self._open_log() as out:
            self.process = await self._start(self.argv, self.environment | last_end, out, out)
        self.starts += 1
        self._since = clock.monotonic()

    def _open_log(self) -> IO[bytes]:
        private_files.make_missing(self.log.parent)
        return private_files.open_private(self.log, "ab")

    async def wait(self) -> Exit:
        """Wait for the end of the current process."""
        assert self.process is not None, f"{self!r} was never started"
        with memory_kills().watched():
            process, code = self.process, await self.process.wait()
        if self._last_end is None or self._ended is not process:
            killed = code == -signal.SIGKILL and not self._killed_here
            cause = memory_kills().claim(self._since) if killed else ""
            self._last_end = Exit(process.pid, code, clock.monotonic() - self._since, cause)
            self._ended = process
        return self._last_end

    def send(self, number: signal.Signals) -> None:
        """Does nothing if it has ended."""
        if self.process is None or not self.alive:
            return
        self._killed_here |= number == signal.SIGKILL
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
        else:
            self.process.send_signal(number)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds."""
        if not self.alive:
            return
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.wait()


def tail_of(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass(slots=True)
class RestartPolicy:
    """Counts the deaths of one child; a life of `EARLY_S` seconds clears the counts. `when`, `least_s`: the
    job's restart_policy and restart_delay_s."""

    when: Kind = "always"
    least_s: float = 0.0
    deaths: int = 0
    own_ends: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> RestartPolicy:
        """Of the job's trainers and parameter servers."""
        return cls(spec.restart_policy, spec.restart_delay_s)

    def starts_again(self, code: int) -> bool:
        """Whether the job wants a child that ended with `code` to be started again at all."""
        return self.when == "always" or (self.when == "on_failure" and code != 0)

    def delay_s(
        self, code: int, lived_s: float, *, was_ready: bool = True, at_work: bool = False, own: bool = False
    ) -> float | None:
        """Seconds until the next start after an end with `code` (as of subprocess); None: give up.

        `was_ready`: whether the child has ever finished its start-up. `at_work`: it has ended in the middle
        of a minibatch, so that is what its death counts against, and not its start. `own`: it has ended by
        itself, whatever the code says.
        """
        if lived_s >= EARLY_S:
            self.deaths = self.own_ends = 0
        self.deaths += 1
        by_itself = (own or code not in (*_FROM_OUTSIDE, SCRIPT_CHANGED)) and not at_work
        self.own_ends += by_itself and not (was_ready and code == LEASE_LOST)
        if self.own_ends >= (MAX_EARLY_ENDS if was_ready else MAX_FAILED_STARTS):
            return None
        return max(self.least_s, backoff_s(self.deaths, FIRST_DELAY_S, MAX_DELAY_S))

    def delay_after(self, end: Exit, *, was_ready: bool, at_work: bool) -> float | None:
        """As `delay_s`."""
        own = bool(end.out_of_memory)
        return self.delay_s(end.code, end.lived_s, was_ready=was_ready, at_work=at_work, own=own)


def death_event(
    name: str, end: Exit, lost: str = "", *, given_up: bool, left: begun.Left | None = None
) -> ChildEvent:
    """`lost`: the lease that it had lost, as text; "": none. `left`: what it had begun."""
    cause, what = f"{end}{_at_work(left)}", "given_up" if given_up else "died"
    if end.code == 0 and not _at_work(left):  # members end so when they were asked to leave
        return ChildEvent(name, what if given_up else "left", AS_ASKED, end.pid)
    if end.code == LEASE_LOST or (lost and end.code == -signal.SIGKILL):
        what = what if given_up else "lost_lease"
        cause = lost or cause
    return ChildEvent(name, what, cause, end.pid)


def _at_work(left: begun.Left | None) -> str:
    works = [] if left is None else list(filter(None, map(BegunWork.from_bytes, left.works)))
    return f" while it {' and '.join(map(str, works))}" if works else ""


@dataclass(frozen=True, slots=True)
class HeldLeases:
    """The registrations in etcd at one moment."""

    trainers: tuple[TrainerMember, ...]
    pservers: tuple[PserverMember, ...]
    master: MasterLock | None
    sweeper: MasterLock | None

    def of(self, child: str, pid: int) -> list[int]:
        """The leases of process `pid`, which is or was the child of that name (`trainer-0`, `pserver-1`,
        `master-0`)."""
        match child.partition("-")[0]:
            case "trainer":
                own = [member.lease for member in self.trainers if member.pid == pid]
                return own + _lease_of(child, self.sweeper)
            case "pserver":
                return [member.lease for member in self.pservers if member.pid == pid]
            case _:
                return _lease_of(child, self.master)


async def held_leases(etcd: Etcd, keys: Keys, timeout_s: float = TIMEOUT_S, named: str = "") -> HeldLeases:
    """Of the members on this host whose names begin with `named`: pids mean something on one host only. A
    record that cannot be read is skipped: its lease expires by itself. Raises PeerError."""
    reads = [
        Get(keys.trainer(named), prefix=True),
        Get(keys.pservers, prefix=True),
        Get(keys.master_lock),
        Get(keys.sweep_lock),
    ]
    found = await etcd.txn([], reads, timeout_s=timeout_s)
    trainers = [
        read_record(TrainerMember, kv.key, kv.value) for kv in found.range(0).kvs if keys.is_trainer(kv.key)
    ]
    pservers = [read_record(PserverMember, kv.key, kv.value) for kv in found.range(1).kvs]
    here = [member for member in (*trainers, *pservers) if member is not None and is_here(member.network)]
    locks = [
        read_record(MasterLock, key, kv.value if (kv := found.range(place).first) else None)
        for place, key in ((2, keys.master_lock), (3, keys.sweep_lock))
    ]
    return HeldLeases(
        tuple(each for each in here if isinstance(each, TrainerMember) and each.trainer.startswith(named)),
        tuple(
            each for each in here if isinstance(each, PserverMember) and each.incarnation.startswith(named)
        ),
        *locks,
    )


async def revoke_leases_of(etcd: Etcd, keys: Keys, child: str, pid: int, named: str = "") -> None:
    """Of process `pid`, which was the child of that name; `named`: see held_leases. Raises TriremeError,
    TimeoutError: the leases then expire by themselves."""
    async with asyncio.timeout(REVOKE_TIMEOUT_S):
        for lease in (await held_leases(etcd, keys, named=named)).of(child, pid):
            await etcd.revoke(lease, timeout_s=REVOKE_TIMEOUT_S)


async def revoke_lock_of(etcd: Etcd, key: str, url: str) -> None:
    """The lease of the lock `key`, if the process of this host held it that answered at `url`: those of other
    hosts, and of other clusters here, have children of the same names. Raises TriremeError, TimeoutError, as
    revoke_leases_of."""
    async with asyncio.timeout(REVOKE_TIMEOUT_S):
        found = await etcd.get(key)
        lock = read_record(MasterLock, key, found.value) if found is not None else None
        if lock is not None and lock.url == url and is_here(lock.network):
            await etcd.revoke(lock.lease)


async def revoke_all_leases(etcd: Etcd, prefix: str) -> None:
    """Of an earlier run's members, whose keys begin with `prefix`. They died with their launcher, but etcd,
    started again on its old data, gives their leases their full time again. Raises PeerError."""
    found = await etcd.range(prefix, prefix=True, keys_only=True)
    for lease in sorted({item.lease for item in found.kvs if item.lease}):
        await etcd.revoke(lease, timeout_s=REVOKE_TIMEOUT_S)


def _lease_of(child: str, holder: MasterLock | None) -> list[int]:
    """The lock's lease if the child, which is of this host, holds the lock."""
    if holder is None or not is_here(holder.network):
        return []
    return [holder.lease] if holder.master.startswith(f"{child}-") else []
