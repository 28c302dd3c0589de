"""A trainer that gets the newest version of its group while the next generation comes leaves the group; it
must not ask again and again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import Group
from trireme_shared.protocol.errors import StaleGeneration
from trireme_shared.protocol.records import TrainerList
from trireme_shared.protocol.wire.messages import PserverInfo


def said(place: int, version: int) -> PserverInfo:
    common = {"job": "j", "incarnation": "i", "generation": 7, "ready": True}
    return PserverInfo(**common, index=place, lowest=version, highest=version, kept=1)


async def test_a_generation_that_ends_while_a_version_is_fetched_ends_forming_its_group():
    """Without a pause in between the loop would hold the event loop: no lease would be renewed any more."""
    group = Group(TrainerList(generation=7, lanes=8, names=("a", "b")), "a", 16)
    asked: list[int] = []

    async def nothing(_: Group) -> None:
        pass

    async def versions(_: Group) -> list[PserverInfo]:
        return [said(1, 5)]

    async def gather(_: Group, version: int) -> None:
        asked.append(version)
        assert len(asked) == 1, "it asks again, though the generation is over"
        view.group = Group(TrainerList(generation=8, lanes=8, names=("a", "b")), "a", 16)

    view = SimpleNamespace(group=group, learn_addresses=nothing)
    server = SimpleNamespace(stated=lambda _: said(0, 4))
    exchange: Any = SimpleNamespace(
        view=view, store=object(), server=server, has=4, versions_in=versions, _gather=gather
    )
    exchange.catch_up = partial(MeanGradients.catch_up, exchange)
    with pytest.raises(StaleGeneration):
        await MeanGradients.form(exchange, group)
    assert asked == [5]
    assert not group.formed.is_set()
