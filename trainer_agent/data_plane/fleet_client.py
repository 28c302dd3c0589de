"""The parameter servers as one trainer reaches them: where they are, which of them are silent, and questions to all of them.

A question that concerns all blocks is asked by one slot map: again if slots move meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Protocol, TypeVar

from shared.errors import DeadlineExceeded, NotReady, PeerError, StaleGeneration, TriremeError, WrongOwner
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import JobState, MasterAddress, PserverMember, SlotMap
from shared.records.assignments import Migration
from shared.records.layout import Layout
from shared.runtime import ids
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.routing import Routes, route
from trainer_agent.data_plane.silence import ASK_S, Silence
from trainer_agent.waiting import Backoff, SingleErrorGroup

REFRESH_S = 0.5
REROUTE_S = 0.25
ADOPT_S = (
    0.01  # until the new owner of a block has the slot map as well: the first wait, each next one is twice as long
)
MOVING_S = 1.0
OWN_LEASE = "etcd did not say whether this trainer is still a member"

T = TypeVar("T")
Connect = Callable[[PserverMember], PserverPort]
Suspect = Callable[[str, str], None]


class JobView(Protocol):
    """What the data plane sees of the job: a Directory, or something like it."""

    @property
    def slots(self) -> SlotMap | None: ...

    @property
    def state(self) -> JobState | None: ...

    @property
    def master(self) -> MasterAddress | None: ...

    @property
    def pservers(self) -> Mapping[int, PserverMember]: ...

    @property
    def migration(self) -> Migration | None: ...

    @property
    def keys(self) -> Keys: ...

    @property
    def revision(self) -> int: ...

    async def changed(self, after_revision: int, timeout_s: float) -> bool: ...

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float, what: str) -> None: ...


class Unanswered(Exception):
    """A pserver gave no answer for too long."""


class Peers:
    """`certain` is awaited before each call: until this trainer is surely a member."""

    def __init__(
        self,
        directory: JobView,
        connect: Connect,
        layout: Layout,
        suspect: Suspect,
        certain: Callable[[], Awaitable[bool]],
    ) -> None:
        self._directory, self._connect, self._layout, self._suspect = directory, connect, layout, suspect
        self._certain = certain
        self._routes: Routes | None = None
        self._silence = Silence()

    @property
    def routes(self) -> Routes:
        slots = self._directory.slots
        if self._routes is None or (slots is not None and slots.version != self._routes.version):
            if slots is None:
                raise NotReady("the master has not placed the blocks yet")
            self._routes = route(self._layout, slots)
        return self._routes

    @property
    def generation(self) -> int:
        return self._directory.state.generation if self._directory.state else 0

    def envelope(self) -> dict[str, Any]:
        """The fields every message starts with, as known now."""
        master = self._directory.master
        return {"job": self._directory.keys.job, "term": master.term if master else 0, "generation": self.generation}

    # ------------------------------------------------------------ questions

    async def _ask(
        self,
        index: int,
        question: Callable[[PserverPort], Coroutine[Any, Any, T]],
        skip_after_s: float | None = None,
        routes: Routes | None = None,
    ) -> T:
        """Raises WrongOwner if the slot map is not that of `routes` any more."""
        backoff = Backoff(f"an answer from pserver-{index}")
        while True:
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                raise Unanswered
            try:
                answer = await question(self._port(index))
            except PeerError as error:
                if self._silence.failed(index, error, skip_after_s):
                    raise Unanswered from error
                await self._suspect_peer(index, error)
                if routes is not None and self.routes.version != routes.version:
                    raise WrongOwner(f"slot map {routes.version} is old: pserver-{index} may be gone") from error
                await backoff.failed(error)
            else:
                self._silence.answered(index)
                return answer

    # ------------------------------------------------------------ peers

    async def _is_silent(self, index: int, skip_after_s: float | None) -> bool:
        """Whether that pserver is left out. Now and then it is asked whether it has parameters and answers again."""
        if skip_after_s is None or not self._silence.holds(index):
            return False
        if not self._silence.is_due(index):
            return True
        try:
            async with asyncio.timeout(ASK_S):
                if not (await self._port(index).info()).ready:
                    raise NotReady(f"pserver-{index} has no parameters yet")
        except (PeerError, TimeoutError) as error:
            known = error if isinstance(error, PeerError) else DeadlineExceeded(f"no answer within {ASK_S:g} s")
            return self._silence.failed(index, known, skip_after_s)
        self._silence.answered(index)
        return False

    async def _ask_by_one_map(self, ask: Callable[[Routes, int], Coroutine[Any, Any, T]]) -> list[T]:
        """Ask all parameter servers that have blocks by one slot map; again if slots move meanwhile: no block may be left out."""
        backoff = Backoff("all parameter servers to have one slot map")
        for refusals in count(1):
            routes = self.routes
            try:
                async with SingleErrorGroup() as group:
                    tasks = [group.create_task(ask(routes, index)) for index in routes.blocks]
            except WrongOwner as error:
                backoff.waited(error)
                await self._rerouted(routes.version, refusals)
            else:
                return [task.result() for task in tasks]
        raise AssertionError("count() ends")

    async def _rerouted(self, version: int, refusals: int, *, moving: bool = False) -> None:
        """After a parameter server has refused what slot map `version` sent to it, for the `refusals`th time: wait for a newer map, if
        it is not here already. The other one may also be the one that lacks it, so it is asked again soon. `moving`: its blocks are
        frozen; nothing helps but a newer map, or the end of the migration."""
        migration = self._directory.migration
        frozen = moving and migration is not None
        limit_s = MOVING_S if frozen else min(REROUTE_S, ids.jitter(ADOPT_S) * 2.0 ** min(refusals - 1, 8))
        with suppress(DeadlineExceeded):
            await self._directory.wait_for(
                lambda seen: self.routes.version != version or (frozen and seen.migration is not migration),
                limit_s,
                "a newer slot map",
            )

    def _port(self, index: int) -> PserverPort:
        member = self._directory.pservers.get(index)
        if member is None:
            raise NotReady(f"pserver-{index} is not registered")
        return self._connect(member)

    async def _suspect_peer(self, index: int, error: TriremeError) -> None:
        """After a failed call: report the pserver to the master, and wait a moment for news in the directory."""
        member = self._directory.pservers.get(index)
        if member is not None and not isinstance(error, NotReady | StaleGeneration):
            self._suspect(member.incarnation, str(error))
            await self._directory.changed(self._directory.revision, REFRESH_S)
