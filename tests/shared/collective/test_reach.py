"""Members that do not reach each other while both reach etcd: the group goes on without one of them, and it
comes back when they do."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.shared.collective.world import TTL_S, named, virtual
from trireme_shared.collective import decider
from trireme_shared.collective.reach import CONNECT_S, cut_off
from trireme_shared.collective.records import Unreached

NOTICED_S = (
    2 * TTL_S + 2 * CONNECT_S + 4.0
)  # not reached for a lease; looks and connections that are tried take time; then words_s


@pytest.mark.parametrize(
    ("ways", "out"),
    [
        ("", ""),
        ("ab", "b"),
        ("ba", "b"),
        ("ab ba", "b"),
        ("cd", "d"),
        ("ad bd cd", "d"),
        ("da db dc", "d"),
        ("ab ac ad", "a"),
        ("ac ad bc bd", "dc"),
        ("ab cd", "db"),
        ("ab bc", "b"),
        ("ax xa", ""),
    ],
)
def test_as_few_as_possible_have_to_go_and_of_two_the_younger_one(ways, out):
    told = [Unreached(by=named(way[0]), members=(named(way[1]),)) for way in ways.split()]
    found = cut_off([named(name) for name in "abcd"], told)
    assert "".join(member.member for member in found) == out
    assert all(found.values())


async def parted(world, group, *ways: str) -> None:
    """Three members, which are in an epoch when these ways are closed."""
    world.begin(group, "a")
    await asyncio.sleep(0.1)  # it has the lock
    world.begin(group, "b")
    await world.until("ab", 3.0)
    world.begin(group, "c")
    await world.until("abc", 3.0)
    world.closed, world.stuck_s = set(ways), TTL_S


@pytest.mark.parametrize(
    ("ways", "left"), [("bc cb", "ab"), ("ba ab", "ac"), ("ab ba ac ca", "bc"), ("ab ba ac ca bc cb", "a")]
)
def test_the_group_goes_on_without_who_has_to_go_until_all_reach_each_other_again(ways, left):
    @virtual
    async def story(world, group):
        await parted(world, group, *ways.split())
        await world.until(left, NOTICED_S)
        count = len(world.ids)
        world.stuck_s = 0.0
        await asyncio.sleep(10 * TTL_S)
        assert await world.members() == left
        assert len(world.ids) == count, "it came back although nobody reaches it"
        world.closed = set()
        while len(await world.members()) < 3:
            await asyncio.sleep(0.1)

    story()


def test_ablation_without_it_they_stay_in_one_group_that_cannot_come_together(monkeypatch):
    monkeypatch.setattr(decider, "cut_off", lambda *_: {})

    @virtual
    async def story(world, group):
        await parted(world, group, "ab", "ba")
        await asyncio.sleep(20 * TTL_S)
        assert await world.members() == "abc"

    story()


@virtual
async def test_nobody_is_left_out_for_an_operation_that_takes_long(world, group):
    await parted(world, group)
    await asyncio.sleep(20 * TTL_S)
    assert await world.members() == "abc"
    assert len(world.ids) == 2


@virtual
async def test_a_way_that_is_open_in_one_direction_costs_the_others_less_and_less(world, group):
    await parted(world, group, "ab")
    times = []
    for _ in range(3):
        await world.until("ac", 100.0)
        times.append(asyncio.get_running_loop().time())
        await world.until("acb", 100.0)
        times[-1] = asyncio.get_running_loop().time() - times[-1]
    assert times == sorted(times)
    assert times[2] > 3 * TTL_S


@partial(virtual, minimum=3)
async def test_nobody_is_left_out_if_too_few_would_be_left(world, group):
    world.begin(group, "a", "b", "c")
    await world.until("abc", 3.0)
    world.closed, world.stuck_s = {"ab", "ba"}, TTL_S
    await asyncio.sleep(20 * TTL_S)
    assert await world.members() == "abc"
    assert len(world.ids) == 1
