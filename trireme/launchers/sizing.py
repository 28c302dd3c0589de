"""How many places a launcher should have: as many as the jobs need, between what the user wants at least and
allows at most.

needed more  ─► start at once
needed less for IDLE_S ─► stop host agents of which every place is idle, newest first
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from trireme.launchers.launcher import Launched, Launcher, OnEvent
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.records.cluster import Kind
from trireme_shared.protocol.rest_cluster import PoolKind, PoolMemberView, PoolView

KINDS: tuple[Kind, Kind] = ("pserver", "trainer")
LOOK_S = 1.0
IDLE_S = 60.0
RETRY_S = 60.0  # at most, after a launcher has failed


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many places of one kind the launcher may have. `least` are there from the start."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class KindNow:
    """`needed`: members that the jobs need. `by_agent`: registered members of each host agent, those that
    leave left out. `idle`: of these, those without a job."""

    needed: int
    by_agent: Mapping[str, int]
    idle: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    start: int = 0
    stop: tuple[str, ...] = ()
    surplus: bool = False  # there are more than are wanted, idle or not


def next_step(now: KindNow, launched: Sequence[Launched], bounds: Bounds, surplus_s: float) -> Step:
    """`launched`: of this kind, oldest first. `surplus_s`: for how long there have been more than are wanted.
    Members that others started count as there; those that were launched count before they are registered."""
    ours = {each.id for each in launched}
    others = sum(count for agent, count in now.by_agent.items() if agent not in ours)
    have = sum(each.places for each in launched)
    wanted = min(max(now.needed - others, bounds.least), bounds.most)
    if have < wanted:
        return Step(start=wanted - have)
    if have == wanted or surplus_s < IDLE_S:
        return Step(surplus=have > wanted)
    stop = []
    for each in reversed(launched):
        idle = now.idle.get(each.id, 0) == now.by_agent.get(each.id, 0)  # also one that never found room
        if idle and have - each.places >= wanted:
            stop.append(each.id)
            have -= each.places
    return Step(stop=tuple(stop), surplus=True)


class Pool(Protocol):
    """What the leader answers (trireme.client)."""

    async def get_pool(self) -> PoolView: ...
    def list_pool_members(self) -> AsyncIterator[PoolMemberView]: ...


@dataclass
class PoolSize:
    """`run` it beside a launcher. `connect`: to the leader. `base`: places of the kind that the launcher does
    not have in its list, and that are there from the start."""

    launcher: Launcher
    bounds: Mapping[Kind, Bounds]
    connect: Callable[[], AbstractAsyncContextManager[Pool]]
    on_event: OnEvent
    _since: dict[Kind, float] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)
    _failures: Counter[Kind] = field(default_factory=Counter)
    _again: dict[Kind, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Follow the needs of the jobs until cancelled."""
        while True:
            try:
                await self._look()
                self._told.pop("leader", None)
            except PeerError:  # no master leads now
                pass
            except TriremeError as error:
                self._tell("leader", error)
            await asyncio.sleep(LOOK_S)

    def _tell(self, of: str, error: TriremeError) -> None:
        """Tell an error once while it stays the same; what failed is tried again."""
        if error.message != self._told.get(of):
            self._told[of] = error.message
            self.on_event(
                ChildEvent("launcher", "waiting", f"{error.message}{error.hint and f' ({error.hint})'}")
            )

    async def _look(self) -> None:
        async with self.connect() as leader:
            needs = await leader.get_pool()
            if not self._may_change(needs):
                self._since.clear()
                return
            members = [member async for member in leader.list_pool_members()]
        for kind in KINDS:
            await self._resize(kind, _now(kind, needs, members))

    def _may_change(self, needs: PoolView) -> bool:
        """Whether the list of all members is worth reading."""
        for kind in KINDS:
            counts = _needed(kind, needs)
            places = sum(each.places for each in self._launched(kind))
            if counts.needed > counts.members - counts.draining or places != self.bounds[kind].least:
                return True
        return False

    async def _resize(self, kind: Kind, now: KindNow) -> None:
        launched = self._launched(kind)
        surplus_s = clock.monotonic() - self._since.get(kind, clock.monotonic())
        step = next_step(now, launched, self.bounds[kind], surplus_s)
        if not step.surplus:
            self._since.pop(kind, None)
        else:
            self._since.setdefault(kind, clock.monotonic())
        if clock.monotonic() < self._again.get(kind, 0.0):
            return
        try:
            if step.start:
                await self.launcher.start(kind, step.start)
                self.on_event(
                    ChildEvent(f"{kind}s", "grown", f"{step.start} more, because jobs need {now.needed}")
                )
            if step.stop:
                await self.launcher.stop(step.stop)
                self.on_event(ChildEvent(f"{kind}s", "shrunk", f"{', '.join(step.stop)} had nothing to do"))
            self._told.pop(kind, None)
            del self._failures[kind]
        except TriremeError as error:  # the other kind may do better
            self._tell(kind, error)
            self._failures[kind] += 1
            self._again[kind] = clock.monotonic() + min(LOOK_S * 2 ** min(self._failures[kind], 10), RETRY_S)

    def _launched(self, kind: Kind) -> list[Launched]:
        return [each for each in self.launcher.list() if each.role == kind]


def _needed(kind: Kind, needs: PoolView) -> PoolKind:
    return needs.trainers if kind == "trainer" else needs.pservers


def _now(kind: Kind, needs: PoolView, members: Collection[PoolMemberView]) -> KindNow:
    there = [each for each in members if each.kind == kind and each.state not in ("draining", "drained")]
    return KindNow(
        needed=_needed(kind, needs).needed,
        by_agent=Counter(each.agent for each in there),
        idle=Counter(each.agent for each in there if each.state == "idle"),
    )
