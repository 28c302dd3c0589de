"""A launcher adds processes to a cluster and takes them away: masters, and host agents with places for members.

    none (members are started by hand) | local processes (local.py) | actors of a Ray cluster (ray_launcher.py)
    containers beside those of a compose project (docker_launcher.py)

What it has started it keeps running: a process that dies is started again, on another machine if its own is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trireme.view.child_events import ChildEvent

Role = Literal["master", "pserver", "trainer"]
ROLES: tuple[Role, ...] = ("pserver", "trainer", "master")  # in the order in which they leave
MODULES = {"master": "master_service", "pserver": "trireme.host", "trainer": "trireme.host"}

OnEvent = Callable[[ChildEvent], None]


@dataclass(frozen=True, slots=True)
class Launched:
    """One process. `id`: also the name of its host agent, so the `agent` of its pool members. `places`: of a host agent, all of kind
    `role`. `trouble`: why it does not run; it is not started again."""

    id: str
    role: Role
    places: int = 1
    trouble: str = ""


class Launcher(Protocol):
    """Safe to use from one event loop."""

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """`count` masters, or host agents with `count` places together; their ids. They may take a while to run, or to find room.
        Raises PeerError."""
        ...

    async def stop(self, ids: Collection[str]) -> None:
        """Ask these to leave and wait for it; who does not leave in time is killed. Unknown ids are none."""
        ...

    def list(self) -> list[Launched]:
        """What was started and not stopped."""
        ...
