"""More processes on this machine: host agents beside the one that a local cluster begins with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from trireme.launchers.launcher import Launched, Role
from trireme_shared.protocol.errors import PeerError


class LocalLauncher:
    """`add` starts a supervised host agent with so many places of one kind and returns its name; `remove` ends it."""

    def __init__(self, add: Callable[[Role, int], Awaitable[str]], remove: Callable[[str], Awaitable[None]]) -> None:
        self._add, self._remove = add, remove
        self._launched: dict[str, Launched] = {}

    def __repr__(self) -> str:
        return f"<LocalLauncher: {len(self._launched)} host agents>"

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """One host agent for all: its members share what it has loaded. Raises PeerError."""
        try:
            name = await self._add(role, count)
        except OSError as error:
            raise PeerError(f"a host agent for {count} members of kind {role} cannot be started: {error}") from error
        self._launched[name] = Launched(name, role, count)
        return [name]

    async def stop(self, ids: Collection[str]) -> None:
        for name in ids:
            if self._launched.pop(name, None) is not None:
                await self._remove(name)

    def list(self) -> list[Launched]:
        return list(self._launched.values())
