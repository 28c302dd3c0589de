"""A Docker Engine of the test's own, which it may stop and kill: containerd and dockerd with folders, socket,
addresses and cgroup of their own. Needs root, and the programs of Docker.

    start ─► restart_in_order: SIGTERM, as an upgrade of the machine's packages or its shutdown does ─► start
         └─► power_cut: SIGKILL to dockerd, containerd, their helpers and all containers at once ─► start
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.compose.engine import run
from tests.compose.project import until
from tests.soak.run import SoakError

PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc", "docker")
ADDRESSES = "base=10.213.0.0/16,size=24"  # beside those of an Engine that the machine has
CONTAINERD = 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
CGROUPS = Path("/sys/fs/cgroup")
# a cgroup counts as one process beside those of the root: its containers together get as much as ten
SHARES, WEIGHT = 10 * 1024, 1000
START_S, STOP_S, DEATH_S = 60.0, 180.0, 30.0


def missing() -> str:
    """Why there can be none; "" if there can."""
    if os.geteuid() != 0:
        return "an Engine of one's own is started by root alone"
    if lacking := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"
    return ""


class PrivateEngine:
    """`folder` keeps images and volumes from one run to the next; None: a temporary one. The end of `with`
    ends the Engine and everything in it. Commands find it by DOCKER_HOST of this process."""

    def __init__(self, folder: Path | None) -> None:
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="trireme-engine-", dir="/var/tmp"))
        self._state = Path(tempfile.mkdtemp(prefix="trireme-engine-"))  # short: it has sockets
        self.socket = self._state / "docker.sock"
        self._cgroup = self._state.name
        self._processes: list[subprocess.Popen[bytes]] = []  # containerd, dockerd

    def __enter__(self) -> Self:
        os.environ["DOCKER_HOST"] = f"unix://{self.socket}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self._state / "containerd.toml").write_text(CONTAINERD)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(SoakError):
            self.stop()
        self.kill()
        os.environ.pop("DOCKER_HOST", None)
        for mounted in self._mounts():
            run(["umount", "--lazy", mounted], check=False)
        for root in self._cgroups():
            for folder in sorted(root.rglob("*/"), reverse=True):
                folder.rmdir()
            root.rmdir()
        shutil.rmtree(self._state, ignore_errors=True)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Raises SoakError: it does not answer."""
        for path in (self._state / "dockerd.pid", self.socket, self._containerd):
            path.unlink(missing_ok=True)
        state, data = self._state, self.folder.resolve()
        self._begin(
            "containerd",
            *("--config", state / "containerd.toml", "--address", self._containerd),
            *("--root", data / "containerd", "--state", state / "containerd"),
        )
        until("containerd's socket", self._containerd.exists, START_S)
        self._give_shares()
        self._begin(
            "dockerd",
            *("--data-root", data / "docker", "--exec-root", state / "docker"),
            *("--pidfile", state / "dockerd.pid", "--host", f"unix://{self.socket}"),
            *("--containerd", self._containerd, "--cgroup-parent", f"/{self._cgroup}"),
            *("--bridge", "none", "--default-address-pool", ADDRESSES),
        )
        until(f"the Engine to answer, see {self.folder}/dockerd.log", self._answers, START_S)

    def restart_in_order(self) -> float:
        """Seconds until it answers again."""
        begun = time.monotonic()
        self.stop()
        if left := self._contained():
            raise SoakError(f"the Engine has ended, and its containers' processes {left} live")
        self.start()
        return time.monotonic() - begun

    def power_cut(self) -> float:
        """Seconds until it answers again."""
        begun = time.monotonic()
        self.kill()
        self.start()
        return time.monotonic() - begun

    def stop(self) -> None:
        """Raises SoakError: it does not end."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired as error:
                raise SoakError(f"{process.args!r} does not end within {STOP_S:.0f} s") from error
        self._processes = []

    def kill(self) -> None:
        """All of it at once, as far as that is possible: whoever could start something again comes first."""
        helpers = {pid for process in self._processes for pid in _children(process.pid)}
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(DEATH_S)
        self._processes = []

        def dead() -> bool:
            left = {*self._contained(), *self._shims(), *(pid for pid in helpers if _is_helper(pid))}
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        until("all processes of the Engine to be dead", dead, DEATH_S)

    # ------------------------------------------------------------ parts

    @property
    def _containerd(self) -> Path:
        return self._state / "containerd.sock"

    def _begin(self, program: str, *arguments: object) -> None:
        with (self.folder / f"{program}.log").open("ab") as log:
            command = [program, *map(str, arguments)]
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    def _answers(self) -> bool:
        for process in self._processes:
            if process.poll() is not None:
                log = self.folder / f"{Path(str(process.args[0])).name}.log"  # type: ignore[index]
                raise SoakError(f"{process.args!r} has ended: {log.read_text(errors='replace')[-2000:]}")
        return bool(run(["docker", "version", "--format", "{{.Server.Version}}"], timeout_s=10).strip())

    def _give_shares(self) -> None:
        for place, file, value in (("cpu", "cpu.shares", SHARES), (".", "cpu.weight", WEIGHT)):
            folder = CGROUPS / place / self._cgroup
            if (CGROUPS / place / "cgroup.procs").exists():
                folder.mkdir(exist_ok=True)
                if (folder / file).exists():
                    (folder / file).write_text(str(value))

    def _cgroups(self) -> list[Path]:
        """Of its containers, in cgroups v1 or v2."""
        return [
            root for root in (CGROUPS / self._cgroup, *CGROUPS.glob(f"*/{self._cgroup}")) if root.exists()
        ]

    def _contained(self) -> list[int]:
        """Processes of its containers."""
        found: set[int] = set()
        for root in self._cgroups():
            for file in root.rglob("cgroup.procs"):
                with suppress(OSError):
                    found |= {int(line) for line in file.read_text().split()}
        return sorted(found)

    def _shims(self) -> list[int]:
        """They name containerd's socket."""
        return [pid for pid in _all() if str(self._containerd) in _command(pid)]

    def _mounts(self) -> list[str]:
        places = (str(self.folder.resolve()), str(self._state))
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line.split()[1] for line in reversed(lines) if line.split()[1].startswith(places)]


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_helper(pid: int) -> bool:
    """What publishes ports; its number may be another process's now."""
    return "docker-proxy" in _command(pid)
