"""A launcher adds processes to a cluster and takes them away: masters, and host agents with places for
members.

    none                                 members are started by hand
    LocalLauncher                        processes on this machine
    ray_launcher.py                      actors of a Ray cluster
    docker_launcher.py                   containers beside those of a compose project

What it has started it keeps running: a process that dies is started again, on another machine if its own is
lost.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from trireme.view.child_events import ChildEvent
from trireme_shared.platform.security.access import is_loopback
from trireme_shared.protocol.errors import InvalidArgument, PeerError

Role = Literal["master", "pserver", "trainer"]
ROLES: tuple[Role, ...] = ("pserver", "trainer", "master")  # in the order in which they leave
MODULES = {"master": "master_service", "pserver": "trireme.host", "trainer": "trireme.host"}
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ITEM = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.:-]*)\s*=\s*(\d+(?:\.\d+)?)\s*([KMGT]iB)?\s*")
_NATIVE = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}

OnEvent = Callable[[ChildEvent], None]


@dataclass(frozen=True, slots=True)
class Launched:
    """One process. `id`: also the name of its host agent, so the `agent` of its pool members. `places`: of a
    host agent, all of kind `role`. `trouble`: why it does not run; it is not started again."""

    id: str
    role: Role
    places: int = 1
    trouble: str = ""


class Launcher(Protocol):
    """Safe to use from one event loop."""

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """`count` masters, or host agents with `count` places together; their ids. They may take a while to
        run, or to find room. Raises PeerError."""
        ...

    async def stop(self, ids: Collection[str]) -> None:
        """Ask these to leave and wait for it; who does not leave in time is killed. Unknown ids are none."""
        ...

    def list(self) -> list[Launched]:
        """What was started and not stopped."""
        ...


class LocalLauncher:
    """More host agents on this machine, beside the one that a local cluster begins with. `add` starts a
    supervised host agent with so many places of one kind and returns its name; `remove` ends it."""

    def __init__(
        self, add: Callable[[Role, int], Awaitable[str]], remove: Callable[[str], Awaitable[None]]
    ) -> None:
        self._add, self._remove = add, remove
        self._launched: dict[str, Launched] = {}

    def __repr__(self) -> str:
        return f"<LocalLauncher: {len(self._launched)} host agents>"

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """One host agent for all: its members share what it has loaded. Raises PeerError."""
        try:
            name = await self._add(role, count)
        except OSError as error:
            raise PeerError(
                f"a host agent for {count} members of kind {role} cannot be started: {error}"
            ) from error
        self._launched[name] = Launched(name, role, count)
        return [name]

    async def stop(self, ids: Collection[str]) -> None:
        for name in ids:
            if self._launched.pop(name, None) is not None:
                await self._remove(name)

    def list(self) -> list[Launched]:
        return list(self._launched.values())


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process takes of a node of Ray: `CPU=2,GPU=1,memory=8GiB,spot=1`. `amounts`: by name. CPU, GPU
    and memory (bytes) mean what they say; other names are the cluster's own."""

    amounts: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.amounts.items())

    @classmethod
    def parse(cls, text: str, option: str) -> Resources:
        """Raises InvalidArgument that names `option`."""
        amounts: dict[str, float] = {}
        for item in text.split(","):
            found = _ITEM.fullmatch(item)
            if found is None or (found[3] and found[1] != "memory"):
                msg = f"{option} {text!r}: {item.strip()!r} is no NAME=AMOUNT"
                raise InvalidArgument(msg, hint="for example CPU=2,GPU=1,memory=8GiB")
            amounts[found[1]] = float(found[2]) * UNITS[found[3] or ""]
        if not any(amounts.values()):
            raise InvalidArgument(
                f"{option} {text!r} asks for nothing", hint="a process takes at least a part of a CPU"
            )
        return cls(amounts)

    @property
    def cores(self) -> int:
        """At least 1."""
        return max(1, int(self.amounts.get("CPU", 1)))

    def bundle(self) -> dict[str, float]:
        """For a placement group."""
        return {name: amount for name, amount in self.amounts.items() if amount}

    def options(self) -> dict[str, Any]:
        """For an actor in such a bundle."""
        native = {option: self.amounts.get(name, 0) for name, option in _NATIVE.items()}
        own = {name: amount for name, amount in self.amounts.items() if name not in _NATIVE}
        return {
            **{name: amount for name, amount in native.items() if amount or name == "num_cpus"},
            "resources": own,
        }


HEAD = "start Ray's head with --node-ip-address=ADDRESS, an address that the other machines reach"


def told_of_loopback(own: str, nodes: Iterable[str]) -> str:
    """What to tell the user of a Ray node whose address is one of its own machine alone, else "". `nodes`:
    the addresses of all nodes. Raises PeerError if there are nodes elsewhere: their processes would try for
    ever."""
    if not is_loopback(own):
        return ""
    elsewhere = [node for node in nodes if not is_loopback(node)]
    if elsewhere:
        msg = (
            f"this Ray node has the address {own}, so nodes elsewhere ({', '.join(elsewhere[:4])}) reach "
            "neither etcd nor masters here"
        )
        raise PeerError(msg, hint=HEAD)
    return f"this Ray node has the address {own}: nodes on other machines cannot take part; {HEAD}"


def unreached_etcd(etcd: str, own: str) -> str:
    """Why a process on the Ray node with the address `own` cannot reach etcd at its URLs, else ""."""
    hosts = [host for url in etcd.split(",") if (host := urlsplit(url).hostname)]
    if not hosts or is_loopback(own) or not all(map(is_loopback, hosts)):
        return ""
    return f"the node {own} cannot reach etcd at {hosts[0]}, an address of another machine alone; {HEAD}"
