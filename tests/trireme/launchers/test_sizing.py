"""How many places a launcher should have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from trireme.launchers.launcher import Launched, Role
from trireme.launchers.sizing import IDLE_S, RETRY_S, Bounds, KindNow, PoolSize, Step, next_step
from trireme.view.child_events import ChildEvent
from trireme_shared.protocol.errors import NotFound, PeerError, TriremeError
from trireme_shared.protocol.rest_cluster import PoolKind, PoolMemberView, PoolView


def launched(*places: int) -> list[Launched]:
    return [Launched(f"l{number}", "trainer", count) for number, count in enumerate(places)]


def now(needed: int, idle: dict[str, int] | None = None, **by_agent: int) -> KindNow:
    return KindNow(needed, by_agent, idle or {})


def test_it_grows_to_what_jobs_need_and_no_further_than_allowed() -> None:
    assert next_step(now(5, l0=2), launched(2), Bounds(2, 8), 0.0) == Step(start=3)
    assert next_step(now(50, l0=2), launched(2), Bounds(2, 8), 0.0) == Step(start=6)
    assert next_step(now(0, l0=2), launched(2), Bounds(2, 8), 0.0) == Step()


def test_what_was_started_counts_before_it_is_registered_and_what_others_started_counts_too() -> None:
    assert next_step(now(5), launched(2, 3), Bounds(2, 8), 0.0) == Step()
    assert next_step(now(5, byhand=4), launched(), Bounds(0, 8), 0.0) == Step(start=1)


def test_idle_agents_above_what_is_needed_are_stopped_after_a_while_newest_first() -> None:
    idle = now(0, {"l1": 1, "l2": 2}, l0=2, l1=1, l2=2)
    assert next_step(idle, launched(2, 1, 2), Bounds(2, 8), IDLE_S - 1) == Step(surplus=True)
    assert next_step(idle, launched(2, 1, 2), Bounds(2, 8), IDLE_S) == Step(stop=("l2", "l1"), surplus=True)


def test_an_agent_with_a_member_at_work_stays() -> None:
    busy = now(1, {"l2": 1}, l0=2, l1=1, l2=2)
    assert next_step(busy, launched(2, 1, 2), Bounds(0, 8), IDLE_S) == Step(surplus=True)


def test_no_agent_is_stopped_that_takes_more_than_the_surplus() -> None:
    idle = now(3, {"l1": 2}, l0=2, l1=2)
    assert next_step(idle, launched(2, 2), Bounds(2, 8), IDLE_S) == Step(surplus=True)


class Leader:
    """Answers as the leader of a cluster whose agents register a second after they were started."""

    def __init__(self) -> None:
        self.needed, self.busy, self.away = 0, False, False
        self.broken: TriremeError | None = None
        self.launched: dict[str, Launched] = {}
        self.starts: list[int] = []

    async def start(self, role: Role, count: int) -> Sequence[str]:
        self.starts.append(count)
        if self.broken is not None:
            raise self.broken
        name = f"{role}s-{len(self.starts)}"
        self.launched[name] = Launched(name, role, count)
        return [name]

    async def stop(self, ids: Collection[str]) -> None:
        for each in ids:
            del self.launched[each]

    def list(self) -> list[Launched]:
        return list(self.launched.values())

    async def get_pool(self) -> PoolView:
        if self.away:
            raise PeerError("no leader")
        members = sum(each.places for each in self.launched.values())
        return PoolView(
            trainers=PoolKind(members=members, idle=0, draining=0, needed=self.needed),
            pservers=PoolKind(members=0, idle=0, draining=0, needed=0),
        )

    async def list_pool_members(self) -> AsyncIterator[PoolMemberView]:
        state = "running" if self.busy else "idle"
        for each in self.launched.values():
            for _ in range(each.places):
                yield PoolMemberView(member_id="m", kind=each.role, host="h", agent=each.id, state=state)


def test_the_pool_follows_the_jobs_through_a_change_of_leaders() -> None:
    async def main() -> None:
        leader, events = Leader(), []

        @asynccontextmanager
        async def connect() -> AsyncIterator[Leader]:
            yield leader

        def on_event(event: ChildEvent) -> None:
            events.append(event.what)

        bounds = {"trainer": Bounds(0, 4), "pserver": Bounds(0, 0)}
        sizing = asyncio.ensure_future(PoolSize(leader, bounds, connect, on_event).run())
        leader.needed, leader.busy, leader.away = 3, True, True
        await asyncio.sleep(10)
        assert not leader.launched
        leader.away = False
        await until(lambda: leader.launched, "more members", 5)
        await asyncio.sleep(10)
        assert leader.starts == [3]
        leader.needed = 0
        await asyncio.sleep(2 * IDLE_S)
        assert leader.launched, "a member at work was stopped"
        leader.busy = False
        await until(lambda: not leader.launched, "the idle ones to be stopped", 5)
        assert events == ["grown", "shrunk"]
        sizing.cancel()

    run_virtually(main)


@pytest.mark.parametrize(
    "error", [PeerError("no room", hint="make some"), NotFound("no room", hint="make some")]
)
def test_a_launcher_that_fails_is_told_once_and_asked_ever_less_often(error: TriremeError) -> None:
    async def main() -> None:
        leader, events = Leader(), []

        @asynccontextmanager
        async def connect() -> AsyncIterator[Leader]:
            yield leader

        def on_event(event: ChildEvent) -> None:
            events.append((event.what, event.cause))

        bounds = {"trainer": Bounds(0, 4), "pserver": Bounds(0, 0)}
        sizing = asyncio.ensure_future(PoolSize(leader, bounds, connect, on_event).run())
        leader.needed, leader.broken = 3, error
        await asyncio.sleep(600)
        assert 10 <= len(leader.starts) <= 20
        assert events == [("waiting", "no room (make some)")]
        leader.broken = None
        await until(lambda: leader.launched, "the next attempt", RETRY_S + 5)
        assert [what for what, _ in events] == ["waiting", "grown"]
        attempts, leader.broken = len(leader.starts), error
        leader.launched.clear()
        await asyncio.sleep(5)
        assert len(leader.starts) - attempts >= 2, "a success begins anew"
        sizing.cancel()

    run_virtually(main)
