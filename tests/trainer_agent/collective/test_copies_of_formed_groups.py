"""A trainer copies its share of a version for a generation only once it is known that all of its members have the same version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from trainer_agent.collective.member import CollectiveMember


async def test_nothing_is_copied_for_a_group_that_is_not_formed():
    """It is copied later: before the version is stepped."""
    copied: list[str] = []

    async def at_version(trainers: str, _: int | None) -> None:
        copied.append(trainers)

    member: Any = object.__new__(CollectiveMember)
    group = SimpleNamespace(formed=asyncio.Event(), trainers="the list")
    member.view = SimpleNamespace(group=group, next_group=asyncio.Event())
    member.replica, member.store = SimpleNamespace(at_rest=True, version=1), None
    member.copies = SimpleNamespace(at_version=at_version)
    vars(member)["_lost"] = ""
    for each in (member.reached, member.stays):
        await each()
    leaving = asyncio.ensure_future(member.leaves())
    await asyncio.sleep(0.01)
    assert copied == []
    group.formed.set()
    await leaving
    await member.leaves()
    assert copied == ["the list"]
    await member.reached()
    assert copied == ["the list"] * 2


async def test_who_gets_lanes_and_is_behind_copies_its_share_of_the_versions_on_the_way():
    """One of them may be evaluated, and the others may be at it still: its checkpoint would lack this trainer's share."""
    copied: list[int] = []
    member: Any = object.__new__(CollectiveMember)
    replica = SimpleNamespace(at_rest=True, version=1, record="a record")

    async def at_version(*_: object) -> None:
        copied.append(replica.version)

    async def pull(_: int) -> None:
        replica.at_rest = False

    def swap() -> None:
        replica.at_rest, replica.version = True, replica.version + 1

    formed = asyncio.Event()
    formed.set()
    member.view = SimpleNamespace(group=SimpleNamespace(formed=formed, trainers="the list"), next_group=asyncio.Event())
    member.replica, member.copies = replica, SimpleNamespace(at_version=at_version)
    member.store = SimpleNamespace(has=3, had_in=lambda _: None)
    vars(member).update(pull=pull, swap=swap, _lost="")
    await member.join(0, None)
    assert copied == [2, 3]
