"""A trainer copies its share of a version for a generation only once it is known that all of its members have the same version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from trainer_agent.collective.member import CollectiveMember


async def test_nothing_is_copied_for_a_group_that_is_not_formed():
    """It is copied later: before the version is stepped."""
    copied: list[str] = []

    async def at_version(trainers: str) -> None:
        copied.append(trainers)

    member: Any = object.__new__(CollectiveMember)
    group = SimpleNamespace(formed=asyncio.Event(), trainers="the list")
    member.view, member.replica = SimpleNamespace(group=group), SimpleNamespace(at_rest=True)
    member.copies = SimpleNamespace(at_version=at_version)
    for each in (member.reached, member.leaves, member.stays):
        await each()
    assert copied == []
    group.formed.set()
    for _ in range(2):
        await member.leaves()
    assert copied == ["the list"]
    await member.reached()
    assert copied == ["the list"] * 2
