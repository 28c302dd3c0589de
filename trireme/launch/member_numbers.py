"""How many members a local run has: parameter servers by `--pservers auto`, threads of each, and what a resize changes.

min(cores / 2, bytes of the parameters / 32 MiB) --> parameter servers        cores / members on this host --> threads

Both are at least 1. Neither changes a bit of the result. The local run follows a resize:

ps_desired, trainers of job/spec --more--> children started      --fewer--> trainers get SIGTERM; parameter servers without a place end
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from trireme.launch.processes import Child
from trireme.launch.resume import Facts, parameter_bytes
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.assignments import GivenNumbers

LOOK_S = 5.0
PAUSE_S = 0.5
BYTES_EACH = 32 << 20
MOST = 128


def pservers_for(model: Facts | None, cores: int) -> int:
    """`model` None (--no-check): 1."""
    size = 0 if model is None else parameter_bytes(model)
    return max(1, min(cores // 2, size // BYTES_EACH, MOST))


def threads_for(spec: JobSpec, cores: int) -> int:
    """Of each parameter server, if all members are on this host: so many that together they have no more threads than cores."""
    return max(1, cores // (spec.pservers + spec.trainers * spec.threads_per_trainer))


class MemberNumbers:
    """`children`: all of the run, by name. A child that left stays among them and may be started again."""

    def __init__(self, spec: JobSpec, children: Mapping[str, Child], spare_pservers: int = 0) -> None:
        self._spec, self._children, self._spares = spec, children, spare_pservers
        self._left: set[str] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<MemberNumbers: {len(self.kept('pserver'))} pservers, {len(self.kept('trainer'))} trainers>"

    def kept(self, role: str) -> list[Child]:
        """Those that have not left, in the order of their numbers."""
        found = [child for name, child in self._children.items() if name.startswith(f"{role}-")]
        return [child for child in found if child.name not in self._left]

    def has_left(self, child: Child) -> bool:
        return child.name in self._left

    def comes_back(self, role: str, supervised: Collection[str]) -> Child | None:
        """One that left and has ended, unless its end is still being seen to: who is `supervised` may be about to be started. It counts again."""
        for name in sorted(self._left):
            child = self._children[name]
            if name.startswith(f"{role}-") and not child.alive and name not in supervised:
                self._left.discard(name)
                return child
        return None

    def is_surplus(self, child: Child, directory: Directory) -> bool:
        """A child has ended: whether it is not started again, because the job wants fewer."""
        if child.name in self._left:
            return True
        wanted = self._pservers_wanted(directory)
        surplus = child.name.startswith("pserver-") and wanted is not None and len(self.kept("pserver")) > wanted
        if surplus and child.pid not in _pids(directory):
            self._left.add(child.name)
            return True
        return False

    async def follow(
        self,
        etcd: Etcd,
        directory: Directory,
        grow: Callable[[str], Awaitable[None]],
        leave: Callable[[Child], Awaitable[None]],
    ) -> None:
        """Until cancelled. `grow(role)` starts one more child, `leave(child)` ends one."""
        await self._own_numbers(etcd, directory)
        trainers = self._spec.trainers
        while True:
            revision = directory.revision
            wanted = self._pservers_wanted(directory)
            for _ in range(len(self.kept("pserver")), wanted or 0):
                await grow("pserver")
            if directory.spec is not None and directory.spec.trainers != trainers:
                trainers = directory.spec.trainers
                for _ in range(len(self.kept("trainer")), trainers):
                    await grow("trainer")
                for child in self.kept("trainer")[trainers:]:
                    self.end(child, leave)
            placed = _pids(directory)
            surplus = [child for child in self.kept("pserver") if child.alive and child.pid not in placed]
            for child in surplus[: max(0, len(self.kept("pserver")) - wanted)] if wanted is not None else ():
                self.end(child, leave)
            await directory.changed(revision, LOOK_S)

    def end(self, child: Child, leave: Callable[[Child], Awaitable[None]]) -> None:
        """It is not needed any more; `leave` ends it."""
        self._left.add(child.name)
        ending = asyncio.ensure_future(leave(child))
        self._leaving.add(ending)
        ending.add_done_callback(self._leaving.discard)

    def _pservers_wanted(self, directory: Directory) -> int | None:
        desired = directory.pservers_desired
        return None if desired is None else desired + self._spares

    async def _own_numbers(self, etcd: Etcd, directory: Directory) -> None:
        """Wait until the numbers in etcd are this run's, or follow from them by a resize; before, they are an earlier run's."""
        mine = self._spec.trainers, self._spec.pservers
        while True:
            revision, spec = directory.revision, directory.spec
            if directory.master is not None and spec is not None:
                if (spec.trainers, spec.pservers) == mine:
                    return
                try:
                    found = await etcd.get(directory.keys.given)
                except PeerError:
                    await asyncio.sleep(ids.jitter(PAUSE_S))
                    continue
                given = read_record(GivenNumbers, directory.keys.given, found.value if found else None)
                if given is not None and (given.trainers, given.pservers) == mine:
                    return
            await directory.changed(revision, PAUSE_S)


def _pids(directory: Directory) -> set[int]:
    """Of the parameter servers that have a place."""
    return {member.pid for member in directory.pservers.values()}
