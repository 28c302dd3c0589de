"""A Ray cluster of several nodes on this machine, each with an address of its own (127.0.0.11, ...). All of
it ends with the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.equipment.command_lines import command_line
from trireme_shared.platform.etcd.embedded import free_ports

MARK = "RAY_TEST_MARK"
LIMIT_S = 90
STORE_BYTES = 100 << 20
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}


class RayNodes:
    """Made by `ray_nodes`. `address`: for --address."""

    def __init__(self, cpus: int) -> None:
        self.mark = uuid.uuid4().hex
        self.cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets must be short
        self.address = f"127.0.0.11:{free_ports(1)[0]}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: set[psutil.Process] = set()  # Ray's own ones with a title have no readable environment

    def add(self) -> str:
        """A node; its address."""
        host = f"127.0.0.{11 + len(self._nodes)}"
        where = ["--address", self.address]
        if not self._nodes:
            port = self.address.rpartition(":")[2]
            where = ["--head", "--port", port, "--temp-dir", str(self.folder), "--include-dashboard", "false"]
            where += ["--system-config", json.dumps(HEALTH)]
        command = [*where, "--node-ip-address", host, "--num-cpus", str(self.cpus), "--object-store-memory"]
        code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
        with (self.folder / f"{host}.log").open("wb") as log:
            self._nodes[host] = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    code,
                    "start",
                    "--block",
                    *command,
                    str(STORE_BYTES),
                    "--disable-usage-stats",
                ],
                env={**os.environ, **QUIET, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + LIMIT_S
        while "Ray runtime started" not in (said := (self.folder / f"{host}.log").read_text()):
            assert self._nodes[host].poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        return host

    def lose(self, host: str) -> None:
        """As a machine that loses power: all its processes end at once."""
        _kill(self._of(host))
        self._nodes[host].wait()

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @property
    def hosts(self) -> list[str]:
        """The nodes that are there."""
        return [host for host, node in self._nodes.items() if node.poll() is None]

    def processes(self) -> list[str]:
        """The command lines of all that runs on the nodes."""
        found = {*self.family(), *(each for host in self.hosts for each in self._of(host))}
        return [line for each in found if (line := command_line(each))]

    def free_cpus(self) -> float:
        """Which no actor and no placement group has."""
        code = (
            f"import ray; ray.init({self.address!r}, log_to_driver=False); "
            "print(ray.available_resources()['CPU'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **QUIET},
            capture_output=True,
            timeout=LIMIT_S,
            check=True,
        )
        return float(done.stdout)

    def _of(self, host: str) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._nodes[host].pid)
            found = [root, *root.children(recursive=True)]
        self._seen.update(found)
        return found

    def close(self) -> None:
        for host in self._nodes:
            self._of(host)
        deadline = time.monotonic() + LIMIT_S
        while left := [*self.family(), *(each for each in self._seen if _runs(each))]:
            _kill(left)
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        for node in self._nodes.values():
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(count: int, cpus: int) -> Iterator[RayNodes]:
    nodes = RayNodes(cpus)
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        nodes.close()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
