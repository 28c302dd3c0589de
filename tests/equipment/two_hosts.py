"""Two hosts on this machine: two networks (Linux namespaces) joined by one link, that can be cut off from
each other and joined again.

    host 1: the network of this process, 10.77.0.1 ──── link ──── host 2: 10.77.0.2

This process must be in a network of its own already (tests/soak/isolation.py: `enter`). Both hosts have the
same name and the same files, but only their own loopback addresses. All processes die with this one, and the
networks with their processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from tests.soak import isolation
from trireme_shared.platform.runtime.process_setup import die_with_parent

Number = Literal[1, 2]
Cut = Literal["dropped", "down"]

ADDRESSES: Mapping[Number, str] = {1: "10.77.0.1", 2: "10.77.0.2"}
LINKS: Mapping[Number, str] = {1: "host1", 2: "host2"}
HOLD = "ip link set lo up && echo ready && exec sleep infinity"
CALL_S = 20.0
END_S = 30.0


def obstacle() -> str:
    """Why this machine cannot have two hosts; "" if it can."""
    make = (
        "ip link add host1 type veth peer name host2 && ip link set host1 up && iptables -w -S && "
        "unshare --net true && nsenter --version"
    )
    why = isolation.obstacle(make)
    return f"{why} (needs iproute2, iptables, util-linux, and root or user namespaces)" if why else ""


class TwoHosts:
    """`async with` joins and ends them. `folder`: for the logs of the processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._holder: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<TwoHosts: {', '.join(self.processes)}>"

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["unshare", "--net", "sh", "-c", HOLD]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_with_parent())
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        _call(
            "ip",
            "link",
            "add",
            LINKS[1],
            "type",
            "veth",
            "peer",
            "name",
            LINKS[2],
            "netns",
            str(self._holder.pid),
        )
        for number in ADDRESSES:
            self._on(number, "ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", LINKS[number])
            self._on(number, "ip", "link", "set", LINKS[number], "up")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()

    async def stop(self) -> None:
        """SIGTERM to all processes, SIGKILL to whoever is there after a while."""
        alive = [process for process in self.processes.values() if process.returncode is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                for process in alive:
                    await process.wait()
        except TimeoutError:
            for process in alive:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def start(
        self, number: Number, name: str, *argv: str, **settings: object
    ) -> asyncio.subprocess.Process:
        """`name` on that host; `settings`: its TRIREME_* variables. Its output is appended to
        `<name>.log`."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TRIREME_")}
        given = {"host": ADDRESSES[number], "name": name} | settings
        with self.log(name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(number),
                *argv,
                env=clean | {f"TRIREME_{key.upper()}": str(value) for key, value in given.items()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def cut(self, how: Cut) -> None:
        """Host 2 hears nobody and reaches nobody from now on: its packets are dropped, or its link is
        down."""
        if how == "down":
            self._on(2, "ip", "link", "set", LINKS[2], "down")
        else:
            for way in (("INPUT", "-i"), ("OUTPUT", "-o")):
                self._on(2, "iptables", "-w", "-A", *way, LINKS[2], "-j", "DROP")

    def join(self) -> None:
        """The opposite of `cut`."""
        self._on(2, "iptables", "-w", "-F")
        self._on(2, "ip", "link", "set", LINKS[2], "up")

    # ------------------------------------------------------------ parts

    def _on(self, number: Number, *command: str) -> None:
        _call(*self._command(number), *command)

    def _command(self, number: Number) -> tuple[str, ...]:
        """What runs a command on that host; the process stays the same."""
        assert self._holder is not None
        return () if number == 1 else ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")


def _call(*command: str) -> None:
    """Raises OSError, SubprocessError."""
    subprocess.run(command, check=True, capture_output=True, timeout=CALL_S)
