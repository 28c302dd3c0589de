"""The processes that serve blocks, as one trainer reaches them: parameter servers, or the trainers of a
collective job.

    who is where    layout and slot map --route--> Routes: the owner of each block
    ask             one process, until it answers            ask_all    all that own blocks, by one slot map
    silence         answers --calls fail for skip_after_seconds--> left out at once, asked now and then
        --> answers

A question that concerns all blocks is asked by one slot map, and asked again if slots move meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

from trainer_agent.data_plane.http import PserverPort
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    NotReady,
    PeerError,
    StaleGeneration,
    TriremeError,
    WrongOwner,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobSpec, JobState, MasterAddress, PserverMember, SlotMap
from trireme_shared.protocol.records.assignments import Migration, slot_of
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.wire.messages import PserverInfo

REFRESH_S = 0.5
REROUTE_S = 0.25
ADOPT_S = (
    # until the new owner of a block has the slot map as well: the first wait, each next one is twice as long
    0.01
)
MOVING_S = 1.0
OWN_LEASE = "etcd did not say whether this trainer is still a member"
ASK_S = 0.25  # what a silent process is given to answer
SHARE = 9.0  # times as long as that, training goes on before a silent process is asked again
SHORTEST_S = 0.1
ROUNDING_S = 1e-6

log = telemetry.logger("fleet")

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


async def at_once() -> bool:
    """Nothing has to be waited for."""
    return False


def nobody(_: int) -> PserverPort | None:
    """This process serves no blocks itself."""
    return None


class FleetClient:
    """Calls to the processes that serve blocks, by their index."""

    def __init__(
        self,
        directory: JobView,
        connect: Connect,
        layout: Layout,
        suspect: Suspect,
        certain: Callable[[], Awaitable[bool]] = at_once,
        own: Callable[[int], PserverPort | None] = nobody,
    ) -> None:
        """`suspect(incarnation, cause)` reports a process that gave no answer. `certain` is awaited before
        each call, until this trainer is surely a member; it answers whether it had to wait. `own(index)` is
        the port of this process, if it serves blocks at that index."""
        self.directory, self.layout = directory, layout
        self._connect, self._suspect, self._certain, self._own = connect, suspect, certain, own
        self._routes: Routes | None = None
        self.silence = Silence()

    def __repr__(self) -> str:
        return f"<FleetClient of {sorted(self.directory.pservers)}, {self.silence!r}>"

    # ------------------------------------------------------------ who is where

    @property
    def routes(self) -> Routes:
        """The newest slot map, as blocks. Raises NotReady: the master has not placed the blocks yet."""
        slots = self.directory.slots
        if self._routes is None or (slots is not None and slots.version != self._routes.version):
            if slots is None:
                raise NotReady("the master has not placed the blocks yet")
            self._routes = route(self.layout, slots)
        return self._routes

    @property
    def generation(self) -> int:
        return self.directory.state.generation if self.directory.state else 0

    def envelope(self) -> dict[str, Any]:
        """The fields that every message starts with, as this trainer knows them now."""
        master = self.directory.master
        return {
            "job": self.directory.keys.job,
            "term": master.term if master else 0,
            "generation": self.generation,
        }

    def port(self, index: int) -> PserverPort:
        """Raises NotReady: no process is registered under that index."""
        if (own := self._own(index)) is not None:
            return own
        member = self.directory.pservers.get(index)
        if member is None:
            raise NotReady(f"pserver-{index} is not registered")
        return self._connect(member)

    async def be_certain(self, backoff: Backoff) -> None:
        """Returns once this trainer is surely a member; a wait for that is no failure of the process that is
        called."""
        if await self._certain():
            backoff.waited(OWN_LEASE)

    # ------------------------------------------------------------ questions

    async def ask(
        self,
        index: int,
        question: Callable[[PserverPort], Coroutine[Any, Any, T]],
        skip_after_s: float | None = None,
        routes: Routes | None = None,
    ) -> T:
        """The answer of one process, asked again after each failure. Raises WrongOwner if the slot map is not
        that of `routes` any more; Unanswered if the process has been silent for `skip_after_s`."""
        backoff = Backoff(f"an answer from pserver-{index}")
        while True:
            await self.be_certain(backoff)
            if await self.is_silent(index, skip_after_s):
                raise Unanswered
            try:
                answer = await question(self.port(index))
            except PeerError as error:
                if self.silence.failed(index, error, skip_after_s):
                    raise Unanswered from error
                await self.suspect(index, error)
                if routes is not None and self.routes.version != routes.version:
                    raise WrongOwner(
                        f"slot map {routes.version} is old: pserver-{index} may be gone"
                    ) from error
                await backoff.failed(error)
            else:
                self.silence.answered(index)
                return answer

    async def ask_all(self, ask: Callable[[Routes, int], Coroutine[Any, Any, T]]) -> list[T]:
        """The answers of all processes that own blocks, asked by one slot map; they are asked again if slots
        move meanwhile, so that no block is left out."""
        backoff = Backoff("all parameter servers to have one slot map")
        for refusals in count(1):
            routes = self.routes
            try:
                async with SingleErrorGroup() as group:
                    tasks = [group.create_task(ask(routes, index)) for index in routes.blocks]
            except WrongOwner as error:
                backoff.waited(error)
                await self.rerouted(routes.version, refusals)
            else:
                return [task.result() for task in tasks]
        raise AssertionError("count() ends")

    async def infos(self, timeline: int = 0) -> list[PserverInfo]:
        """What each process that owns blocks says of itself, once it has the parameters of that timeline."""

        async def ready(port: PserverPort) -> PserverInfo:
            info = await port.info()
            if not info.ready:
                raise NotReady(f"pserver-{info.index} has no parameters yet")
            if info.timeline != timeline:
                raise NotReady(
                    f"pserver-{info.index} has parameters of timeline {info.timeline}, not of {timeline}"
                )
            return info

        async def ask(routes: Routes, index: int) -> PserverInfo:
            info = await self.ask(index, ready, routes=routes)
            if info.slots not in (0, routes.version):  # it may lack blocks, or some may be counted nowhere
                raise WrongOwner(f"pserver-{index} has slot map {info.slots}, this trainer {routes.version}")
            return info

        return await self.ask_all(ask)

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """The lanes that blocks of one process lack for `step`; `number` chooses the process among all. One
        attempt. Raises PeerError."""
        indexes = sorted(self.routes.blocks)
        info = await self.port(indexes[number % len(indexes)]).info()
        return info.missing if info.ready and info.lowest == step else ()

    # ------------------------------------------------------------ after calls that failed

    async def is_silent(self, index: int, skip_after_s: float | None) -> bool:
        """Whether that process is left out. Now and then it is asked whether it has parameters and answers
        again."""
        if skip_after_s is None or not self.silence.holds(index):
            return False
        if not self.silence.is_due(index):
            return True
        try:
            async with asyncio.timeout(ASK_S):
                if not (await self.port(index).info()).ready:
                    raise NotReady(f"pserver-{index} has no parameters yet")
        except (PeerError, TimeoutError) as error:
            known = (
                error if isinstance(error, PeerError) else DeadlineExceeded(f"no answer within {ASK_S:g} s")
            )
            return self.silence.failed(index, known, skip_after_s)
        self.silence.answered(index)
        return False

    async def rerouted(self, version: int, refusals: int, *, moving: bool = False) -> None:
        """Called after a process has refused, for the `refusals`th time, what slot map `version` sent to it:
        waits for a newer map, if it is not here already. The other process may also be the one that lacks the
        map, so it is asked again soon. `moving`: its blocks are frozen; nothing helps but a newer map, or the
        end of the migration."""
        migration = self.directory.migration
        frozen = moving and migration is not None
        limit_s = MOVING_S if frozen else min(REROUTE_S, ids.jitter(ADOPT_S) * 2.0 ** min(refusals - 1, 8))
        with suppress(DeadlineExceeded):
            await self.directory.wait_for(
                lambda seen: self.routes.version != version or (frozen and seen.migration is not migration),
                limit_s,
                "a newer slot map",
            )

    async def suspect(self, index: int, error: TriremeError) -> None:
        """Called after a failed call: reports the process to the master, and waits a moment for news in the
        directory."""
        member = self.directory.pservers.get(index)
        if member is not None and not isinstance(error, NotReady | StaleGeneration):
            self._suspect(member.incarnation, str(error))
            await self.directory.changed(self.directory.revision, REFRESH_S)


class Silence:
    """Which processes give no answer (asynchronous jobs, `skip_after_seconds`), by index: they are left out
    until they answer again."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._ask_at: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<Silence of {sorted(self._ask_at)}>"

    def answered(self, index: int) -> None:
        since = self._since.pop(index, None)
        if self._ask_at.pop(index, None) is not None and since is not None:
            log.info("pserver_answers_again", pserver=index, seconds=round(clock.monotonic() - since, 1))

    def failed(self, index: int, error: PeerError, skip_after_s: float | None) -> bool:
        """After a call that failed: whether that pserver is left out from now on."""
        now = clock.monotonic()
        since = self._since.setdefault(index, now - float(error.details.get("silent_s", 0.0)))
        if skip_after_s is None or now - since < skip_after_s - ROUNDING_S:
            return False
        if index not in self._ask_at:
            log.warning("pserver_silent", pserver=index, seconds=round(now - since, 1), cause=str(error))
        self._ask_at[index] = now + SHARE * ASK_S
        return True

    def holds(self, index: int) -> bool:
        """Whether it is left out."""
        return index in self._ask_at

    def is_due(self, index: int) -> bool:
        """Whether it is to be asked again."""
        return clock.monotonic() >= self._ask_at[index]


def call_limit_s(spec: JobSpec, stall_s: float) -> float:
    """How long a call may wait for a peer that is silent, if it may wait for `stall_s` otherwise."""
    return (
        stall_s if spec.skip_after_seconds is None else min(stall_s, max(SHORTEST_S, spec.skip_after_seconds))
    )


@dataclass(frozen=True, slots=True)
class Routes:
    """`owners[block]`: pserver index. `blocks[index]`: in ascending order; if the model has embedding tables,
    of each parameter server that owns slots, maybe none. `slots[slot]`: pserver index. `version`: of the slot
    map."""

    version: int
    owners: tuple[int, ...]
    blocks: dict[int, tuple[int, ...]]
    slots: tuple[int, ...] = ()

    def split(self, blocks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Some blocks by pserver index."""
        found: dict[int, list[int]] = {}
        for block in blocks:
            found.setdefault(self.owners[block], []).append(block)
        return {index: tuple(found[index]) for index in sorted(found)}

    def changed_since(self, before: Routes) -> list[int]:
        """The parameter servers that have other slots by this map than by that one, without those that have
        none now."""
        pairs = zip(before.slots, self.slots, strict=True)
        changed = {index for was, now in pairs if was != now for index in (was, now)}
        return sorted(changed.intersection(self.slots))


def route(layout: Layout, slots: SlotMap) -> Routes:
    owners = tuple(slots.owners[slot_of(block.number, layout.slot_count)] for block in layout.blocks())
    routes = Routes(slots.version, owners, {}, slots.owners)
    if layout.tables:
        routes.blocks.update((index, ()) for index in sorted(set(slots.owners)))
    routes.blocks.update(routes.split(range(len(owners))))
    return routes
