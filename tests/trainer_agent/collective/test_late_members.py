"""Who waits longer than usual tells the master about those it waits for, unless enough others do."""

from __future__ import annotations

import asyncio

from tests.equipment.virtual_loop import run_virtually
from trainer_agent.collective.groups import AGAIN, FIRST, TELLERS, Group, LateMembers, follows, pserver_of
from trireme_shared.protocol.records import Exchange, TrainerList, TrainerMember

LEASE_S = 2.0
NAMES = tuple("abcdefgh")


def group_of(me: str, names: tuple[str, ...] = NAMES) -> Group:
    group = Group(TrainerList(generation=7, lanes=8, names=names), me, 16)
    for place, name in group.others.items():
        exchange = Exchange(url=f"http://{name}")
        common = {"trainer": name, "incarnation": name, "host": "h", "pid": 1}
        group.members[place] = pserver_of(TrainerMember(**common, url=f"http://{name}", exchange=exchange))
    return group


def told(waits: list[float], late: str = "b", me: str = "c") -> list[list[str]]:
    """Of each wait."""
    found: list[list[str]] = []

    async def main() -> None:
        members = LateMembers(lambda name, cause: found[-1].append(f"{name}: {cause}"), LEASE_S)
        for seconds in waits:
            found.append([])
            with members.watching(group_of(me), lambda: [NAMES.index(name) for name in late]):
                await asyncio.sleep(seconds)
        await asyncio.sleep(10 * LEASE_S)

    run_virtually(main)
    return found


def test_who_waits_for_a_quarter_of_a_lease_tells_it_and_again_until_the_version_is_there():
    first, second = FIRST * LEASE_S, (FIRST + AGAIN) * LEASE_S
    assert told([first - 0.01]) == [[]]
    assert told([first + 0.01]) == [[f"b: waited {first:.2f} s for it"]]
    assert told([second + 0.01]) == [[f"b: waited {first:.2f} s for it", f"b: waited {second:.2f} s for it"]]


def test_where_steps_take_long_nobody_is_told_before_twice_that_time():
    assert [len(each) for each in told([3.0, 3.0, 3.0, 5.9])][1:] == [0, 0, 0]
    assert len(told([3.0, 3.0, 3.0, 6.1])[-1]) == 1


def test_one_long_wait_does_not_make_the_next_ones_long():
    assert [bool(each) for each in told([0.1, 0.1, 0.1, 9.0, 0.6])] == [False, False, False, True, True]


def test_three_that_follow_it_tell_about_one_and_nobody_about_itself():
    for late in range(len(NAMES)):
        tellers = {me for place, me in enumerate(NAMES) if follows(group_of(me), late)}
        assert tellers == {NAMES[(late + each) % len(NAMES)] for each in range(1, TELLERS + 1)}
    assert [me for me in "ab" if follows(group_of(me, ("a", "b")), 0)] == ["b"]


def test_a_spare_tells_nothing():
    names = tuple(f"t{number}" for number in range(9))  # eight have lanes
    assert not any(follows(group_of("t8", names), place) for place in range(8))
